// The layers of a decoder as one thread of a team runs them. Between barriers each thread writes its own part, and no
// sum is split over threads, so their number does not show in the result.
#pragma once
#include "workspace.h"

namespace headrace {

constexpr int64_t QUERY_BLOCK = 32;     // queries that share a converted key tile
constexpr int64_t FFN_BLOCK = 96;       // gate and up rows between two activations
constexpr int64_t SHARE_MULTIPLE = 12;  // rows of W per thread are cut at whole tiles

struct Range {
    int64_t begin, end;
};

// Part `index` of `count` of [0, total), cut at multiples.
inline Range share(int64_t total, int64_t multiple, int64_t index, int64_t count) {
    const int64_t units = (total + multiple - 1) / multiple;
    return {std::min(total, units * index / count * multiple), std::min(total, units * (index + 1) / count * multiple)};
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* out) {
    vf squares = vzero();
    int64_t k = 0;
    for (; k + VL <= width; k += VL) squares = vfma(vload(x + k), vload(x + k), squares);
    float sum = vsum(squares);
    for (; k < width; ++k) sum = std::fma(x[k], x[k], sum);
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
    for (k = 0; k + VL <= width; k += VL) vstore(out + k, vmul(vmul(vload(x + k), vset(scale)), vload(weight + k)));
    for (; k < width; ++k) out[k] = x[k] * scale * weight[k];
}

template <class W, class K>
class Decoder {
   public:
    Decoder(const Model& model, const Step& step, Workspace& space, int64_t thread, int64_t threads)
        : m_(model), s_(step), w_(space), me_(space.threads[thread]), thread_(thread), threads_(threads) {
        hidden_ = round_up(m_.hidden, PAD);
        shape_ = {round_up(m_.rank, PAD) + round_up(m_.rope, PAD), round_up(m_.rank, PAD)};
        q_width_ = m_.heads * (m_.nope + m_.rope);
        q_stride_ = round_up(q_width_, PAD);
        kv_stride_ = round_up(m_.rank + m_.rope, PAD);
        out_stride_ = round_up(m_.heads * m_.v, PAD);
    }

    void run() {
        embed();
        for (int64_t index = 0; index < m_.num_layers; ++index) {
            attention(m_.layers[index], index);
            feed_forward(m_.layers[index], index);
        }
        head();
    }

   private:
    static void barrier() {
#pragma omp barrier
    }

    Range rows_of(int64_t total) const { return share(total, 1, thread_, threads_); }

    void embed() {
        const W* table = static_cast<const W*>(m_.embedding);
        const Range mine = rows_of(s_.tokens);
        for (int64_t t = mine.begin; t < mine.end; ++t) copy_row(table + s_.token_ids[t] * m_.hidden, x(t), m_.hidden);
        barrier();
    }

    float* x(int64_t t) { return w_.x.data.data() + t * hidden_; }

    // Normalised rows [tokens, width padded]; ready for every thread on return.
    const float* normed(const float* from, int64_t from_stride, const float* weight, float eps, int64_t width,
                        int64_t rows) {
        const int64_t stride = round_up(width, PAD);
        const bool few = rows <= FEW_ROWS;
        float* out = few ? me_.normed.data.data() : w_.normed.data.data();
        const Range mine = few ? Range{0, rows} : rows_of(rows);
        for (int64_t t = mine.begin; t < mine.end; ++t) {
            rms_norm(from + t * from_stride, weight, eps, width, out + t * stride);
            std::fill(out + t * stride + width, out + (t + 1) * stride, 0.0f);
        }
        if (!few) barrier();
        return out;
    }

    // This thread's share of a product. No barrier.
    void product(const float* input, int64_t input_stride, int64_t rows, const void* weight, int64_t n, int64_t k,
                 float* y, int64_t y_stride, const float* bias, bool add) {
        const Run<W> run{static_cast<const W*>(weight), k, 0, k};
        const Panel<W> panel{&run, 1, n, y, y_stride, bias, add};
        const Range mine = share(n, SHARE_MULTIPLE, thread_, threads_);
        if (mine.begin < mine.end) panel_rows<W>(input, input_stride, rows, panel, mine.begin, mine.end, me_.gemm);
    }

    // Only the rows of q that are not all zero; the others are dead lanes, which nobody reads.
    void query_product(const Layer& layer, const float* input, int64_t input_stride, int64_t k) {
        int64_t live = 0;
        for (int64_t r = 0; r < layer.num_q_runs; ++r) live += layer.q_runs[2 * r + 1];
        const Range mine = share(live, SHARE_MULTIPLE, thread_, threads_);
        const Run<W> run{static_cast<const W*>(layer.q), k, 0, k};
        const Panel<W> panel{&run, 1, q_width_, w_.q.data.data(), q_stride_, nullptr, false};
        int64_t before = 0;
        for (int64_t r = 0; r < layer.num_q_runs; ++r) {
            const int64_t first = layer.q_runs[2 * r], count = layer.q_runs[2 * r + 1];
            const int64_t begin = std::max(mine.begin - before, int64_t{0}), end = std::min(mine.end - before, count);
            if (begin < end) panel_rows<W>(input, input_stride, s_.tokens, panel, first + begin, first + end, me_.gemm);
            before += count;
        }
    }

    void attention(const Layer& layer, int64_t index) {
        const float* h = normed(x(0), hidden_, layer.attention_norm, m_.eps, m_.hidden, s_.tokens);
        product(h, hidden_, s_.tokens, layer.kv_a, m_.rank + m_.rope, m_.hidden, w_.kv.data.data(), kv_stride_,
                layer.kv_a_bias, false);
        if (layer.q_a) {
            const int64_t low_stride = round_up(m_.q_rank, PAD);
            float* low = w_.q_low.data.data();
            product(h, hidden_, s_.tokens, layer.q_a, m_.q_rank, m_.hidden, low, low_stride, layer.q_a_bias, false);
            barrier();
            const float* low_normed = normed(low, low_stride, layer.q_a_norm, m_.lora_eps, m_.q_rank, s_.tokens);
            query_product(layer, low_normed, low_stride, m_.q_rank);
        } else {
            query_product(layer, h, hidden_, m_.hidden);
        }
        barrier();
        const Range items = rows_of(s_.tokens * (m_.heads + 1));
        for (int64_t item = items.begin; item < items.end; ++item) {
            const int64_t t = item / (m_.heads + 1), h_index = item % (m_.heads + 1);
            if (h_index == m_.heads)
                store_entry(layer, index, t);
            else
                absorb_query(layer, t, h_index);
        }
        barrier();
        attend_all(layer, index);
        barrier();
        product(w_.attended.data.data(), out_stride_, s_.tokens, layer.o, m_.hidden, m_.heads * m_.v, x(0), hidden_,
                layer.o_bias, true);
        barrier();
    }

    void turn(const float* from, int64_t t, float* to) const {
        const int64_t half = m_.rope / 2;
        const float *cos = s_.cos + t * half, *sin = s_.sin + t * half;
        for (int64_t i = 0; i < half; ++i) {
            const int64_t a = m_.interleaved ? 2 * i : i, b = m_.interleaved ? 2 * i + 1 : i + half;
            const float first = from[a], second = from[b];
            to[a] = first * cos[i] - second * sin[i];
            to[b] = second * cos[i] + first * sin[i];
        }
    }

    void store_entry(const Layer& layer, int64_t index, int64_t t) {
        float* kv = w_.kv.data.data() + t * kv_stride_;
        if (layer.kv_a_norm) rms_norm(kv, layer.kv_a_norm, m_.lora_eps, m_.rank, kv);
        turn(kv + m_.rank, t, kv + m_.rank);
        const int64_t position = s_.positions[t], sequence = sequence_of(t);
        const int64_t row = s_.block_tables[sequence * s_.max_blocks + position / m_.block_tokens];
        K* entry = reinterpret_cast<K*>(s_.rows + row * m_.row_bytes + index * m_.layer_bytes) +
                   position % m_.block_tokens * (m_.rank + m_.rope);
        for (int64_t i = 0; i < m_.rank + m_.rope; ++i) {
            if constexpr (sizeof(K) == 4)
                entry[i] = kv[i];
            else
                entry[i] = narrow(kv[i]);
        }
    }

    int64_t sequence_of(int64_t t) const {
        int64_t sequence = 0;
        for (int64_t first = 0; first + s_.lengths[sequence] <= t; ++sequence) first += s_.lengths[sequence];
        return sequence;
    }

    void absorb_query(const Layer& layer, int64_t t, int64_t head) {
        const float* q = w_.q.data.data() + t * q_stride_ + head * (m_.nope + m_.rope);
        float* out = w_.absorbed.data.data() + (t * m_.heads + head) * shape_.entry;
        turn(q + m_.nope, t, out + shape_.rank16);
        if (!layer.nope_live[head]) return;
        const W* key = static_cast<const W*>(layer.kv_b) + head * (m_.nope + m_.v) * m_.rank;
        int64_t lane = 0;
        for (; lane + VL <= m_.rank; lane += VL) {
            vf acc = vzero();
            for (int64_t d = 0; d < m_.nope; ++d) acc = vfma(vset(q[d]), vload(key + d * m_.rank + lane), acc);
            vstore(out + lane, acc);
        }
        for (; lane < m_.rank; ++lane) {
            float acc = 0.0f;
            for (int64_t d = 0; d < m_.nope; ++d) {
                float weight;
                copy_row(key + d * m_.rank + lane, &weight, 1);
                acc = std::fma(q[d], weight, acc);
            }
            out[lane] = acc;
        }
    }

    // Blocks of queries, and heads where there are too few of them, are taken one by one by whoever is free.
    void attend_all(const Layer& layer, int64_t index) {
        int64_t blocks = 0;
        for (int64_t s = 0; s < s_.sequences; ++s) blocks += (s_.lengths[s] + QUERY_BLOCK - 1) / QUERY_BLOCK;
        const int64_t parts = blocks >= 2 * threads_ ? 1 : std::min(m_.heads, threads_);
        std::atomic<int64_t>& next = w_.counters[index * 3];
        for (int64_t item = next++; item < blocks * parts; item = next++) {
            int64_t block = item / parts, sequence = 0, row = 0;
            for (;; ++sequence) {
                const int64_t here = (s_.lengths[sequence] + QUERY_BLOCK - 1) / QUERY_BLOCK;
                if (block < here) break;
                block -= here;
                row += s_.lengths[sequence];
            }
            const int64_t first = block * QUERY_BLOCK;
            const Range heads = share(m_.heads, 1, item % parts, parts);
            const Queries queries{w_.absorbed.data.data() + (row + first) * m_.heads * shape_.entry,
                                  w_.attended.data.data() + (row + first) * out_stride_,
                                  out_stride_,
                                  std::min(QUERY_BLOCK, s_.lengths[sequence] - first),
                                  s_.starts[sequence] + first,
                                  s_.block_tables + sequence * s_.max_blocks,
                                  heads.begin,
                                  heads.end};
            attend<W, K>(m_, layer, index, shape_, s_.rows, queries, me_.attention);
        }
    }

    void feed_forward(const Layer& layer, int64_t index) {
        const float* h = normed(x(0), hidden_, layer.ffn_norm, m_.eps, m_.hidden, s_.tokens);
        if (!layer.router) {
            wide_ffn(layer.ffns, 1, nullptr, h);
            return;
        }
        route(layer, h);
        if (m_.top_k == layer.num_ffns)
            wide_ffn(layer.ffns, layer.num_ffns, w_.chosen_weight.data(), h);
        else
            sparse_ffn(layer, index, h);
        if (layer.shared) wide_ffn(layer.shared, 1, nullptr, h);
    }

    // silu(gate h) ∘ up h of rows [begin, end) of one network for `rows` inputs, times a weight per input.
    void activation(const Ffn& ffn, Range inner, const float* input, int64_t rows, float* act, int64_t act_stride,
                    const float* weight, int64_t weight_stride) {
        const Run<W> gate{static_cast<const W*>(ffn.gate), m_.hidden, 0, m_.hidden};
        const Run<W> up{static_cast<const W*>(ffn.up), m_.hidden, 0, m_.hidden};
        float* g = me_.gate.ensure(rows * FFN_BLOCK);
        float* u = me_.up.ensure(rows * FFN_BLOCK);
        for (int64_t begin = inner.begin; begin < inner.end; begin += FFN_BLOCK) {
            const int64_t end = std::min(inner.end, begin + FFN_BLOCK);
            panel_rows<W>(input, hidden_, rows, Panel<W>{&gate, 1, ffn.inner, g - begin, FFN_BLOCK, nullptr, false},
                          begin, end, me_.gemm);
            panel_rows<W>(input, hidden_, rows, Panel<W>{&up, 1, ffn.inner, u - begin, FFN_BLOCK, nullptr, false},
                          begin, end, me_.gemm);
            for (int64_t t = 0; t < rows; ++t) {
                const float scale = weight ? weight[t * weight_stride] : 1.0f;
                float* out = act + t * act_stride;
                for (int64_t i = begin; i < end; i += VL) {
                    const float *gi = g + t * FFN_BLOCK + (i - begin), *ui = u + t * FFN_BLOCK + (i - begin);
                    const vf value = vload(gi);
                    const vf silu = vdiv(value, vadd(vset(1.0f), vexp(vsub(vzero(), value))));
                    const vf result = vmul(vmul(silu, vload(ui)), vset(scale));
                    if (i + VL <= end) {
                        vstore(out + i, result);
                    } else {
                        float rest[VL];
                        vstore(rest, result);
                        std::copy(rest, rest + (end - i), out + i);
                    }
                }
            }
        }
    }

    // One network, or several that every token runs: their inner rows stand side by side and one product sums them.
    void wide_ffn(const Ffn* ffns, int64_t count, const float* weight, const float* h) {
        const int64_t inner = ffns[0].inner, stride = round_up(inner * count, PAD);
        float* act = w_.act.data.data();
        const Range mine = share(inner * count, SHARE_MULTIPLE, thread_, threads_);
        for (int64_t f = mine.begin / inner; f < count && f * inner < mine.end; ++f) {
            const Range part{std::max(mine.begin - f * inner, int64_t{0}), std::min(mine.end - f * inner, inner)};
            activation(ffns[f], part, h, s_.tokens, act + f * inner, stride, weight ? weight + f : nullptr, count);
        }
        // The pad behind a row is read as zeros; another layer's wider row may have left values there.
        if (thread_ == 0)
            for (int64_t t = 0; t < s_.tokens; ++t)
                std::fill(act + t * stride + inner * count, act + (t + 1) * stride, 0.0f);
        barrier();
        std::vector<Run<W>> runs;
        for (int64_t f = 0; f < count; ++f)
            runs.push_back({static_cast<const W*>(ffns[f].down), inner, f * inner, inner});
        const Panel<W> panel{runs.data(), static_cast<int>(count), m_.hidden, x(0), hidden_, nullptr, true};
        const Range rows = share(m_.hidden, SHARE_MULTIPLE, thread_, threads_);
        if (rows.begin < rows.end) panel_rows<W>(act, stride, s_.tokens, panel, rows.begin, rows.end, me_.gemm);
        barrier();
    }

    void route(const Layer& layer, const float* h) {
        const int64_t experts = layer.num_ffns, top_k = m_.top_k;
        const Run<float> run{layer.router, m_.hidden, 0, m_.hidden};
        std::vector<float> scores(experts);
        const Panel<float> panel{&run, 1, experts, scores.data(), experts, nullptr, false};
        const Range mine = rows_of(s_.tokens);
        for (int64_t t = mine.begin; t < mine.end; ++t) {
            panel_rows<float>(h + t * hidden_, hidden_, 1, panel, 0, experts, me_.gemm);
            choose_experts(m_, scores, layer.router_bias, w_.chosen.data() + t * top_k,
                           w_.chosen_weight.data() + t * top_k);
        }
        barrier();
    }

    // Tokens gathered by expert; each expert's network on its rows; sums per token in ascending expert order.
    void sparse_ffn(const Layer& layer, int64_t index, const float* h) {
        const int64_t experts = layer.num_ffns, top_k = m_.top_k, routes = s_.tokens * top_k;
        const int64_t inner = layer.ffns[0].inner, act_stride = round_up(inner, PAD);
        if (thread_ == 0) w_.dispatch.fill(w_.chosen, w_.chosen_weight, top_k, experts);
        barrier();
        float* input = w_.expert_in.data.data();
        const Range mine = rows_of(routes);
        for (int64_t r = mine.begin; r < mine.end; ++r)
            std::copy(h + w_.dispatch.routed[r].token * hidden_, h + (w_.dispatch.routed[r].token + 1) * hidden_,
                      input + r * hidden_);
        barrier();
        float *act = w_.expert_act.data.data(), *out = w_.expert_out.data.data();
        const int64_t inner_blocks = (inner + FFN_BLOCK - 1) / FFN_BLOCK;
        std::atomic<int64_t>& next = w_.counters[index * 3 + 1];
        for (int64_t item = next++; item < experts * inner_blocks; item = next++) {
            const int64_t e = item / inner_blocks, begin = item % inner_blocks * FFN_BLOCK;
            const int64_t first = w_.dispatch.start[e], rows = w_.dispatch.start[e + 1] - first;
            if (rows == 0) continue;
            const Range part{begin, std::min(inner, begin + FFN_BLOCK)};
            activation(layer.ffns[e], part, input + first * hidden_, rows, act + first * act_stride, act_stride,
                       &w_.dispatch.routed[first].weight, sizeof(Routed) / sizeof(float));
            if (part.end == inner)
                for (int64_t r = first; r < first + rows; ++r)
                    std::fill(act + r * act_stride + inner, act + (r + 1) * act_stride, 0.0f);
        }
        barrier();
        const int64_t out_blocks = (m_.hidden + FFN_BLOCK - 1) / FFN_BLOCK;
        std::atomic<int64_t>& next_out = w_.counters[index * 3 + 2];
        for (int64_t item = next_out++; item < experts * out_blocks; item = next_out++) {
            const int64_t e = item / out_blocks, begin = item % out_blocks * FFN_BLOCK;
            const int64_t first = w_.dispatch.start[e], rows = w_.dispatch.start[e + 1] - first;
            if (rows == 0) continue;
            const Run<W> down{static_cast<const W*>(layer.ffns[e].down), inner, 0, inner};
            const Panel<W> panel{&down, 1, m_.hidden, out + first * hidden_, hidden_, nullptr, false};
            panel_rows<W>(act + first * act_stride, act_stride, rows, panel, begin,
                          std::min(m_.hidden, begin + FFN_BLOCK), me_.gemm);
        }
        barrier();
        const Range tokens = rows_of(s_.tokens);
        for (int64_t t = tokens.begin; t < tokens.end; ++t)
            for (int64_t k = 0; k < top_k; ++k) {
                const float* part = out + w_.dispatch.slot[t * top_k + k] * hidden_;
                for (int64_t i = 0; i < m_.hidden; ++i) x(t)[i] += part[i];
            }
        barrier();
    }

    void head() {
        if (s_.num_logits == 0) return;
        float* rows = w_.normed.data.data();
        const Range mine = rows_of(s_.num_logits);
        for (int64_t r = mine.begin; r < mine.end; ++r) {
            rms_norm(x(s_.logit_rows[r]), m_.norm, m_.eps, m_.hidden, rows + r * hidden_);
            std::fill(rows + r * hidden_ + m_.hidden, rows + (r + 1) * hidden_, 0.0f);
        }
        barrier();
        product(rows, hidden_, s_.num_logits, m_.head, m_.vocab, m_.hidden, s_.logits, m_.vocab, nullptr, false);
    }

    const Model& m_;
    const Step& s_;
    Workspace& w_;
    ThreadState& me_;
    int64_t thread_, threads_;
    int64_t hidden_, q_width_, q_stride_, kv_stride_, out_stride_;
    Shape shape_;
};

}  // namespace headrace
