// Absorbed latent attention over pool rows: every head of a token meets the same entry [latent ‖ rope key].
//
// Keys come in tiles of 128 from position 0 and each query keeps a running maximum and sum, so its result is one fixed
// sequence of operations over its own keys, whoever shares the tile (law L5).
//
// Lane runs name the parts of an entry that a head can meet with something else than zero, found from the weights when
// the model is loaded. A model of grouped heads written as MLA (each head sees its group's lanes only) costs what the
// grouped model would; a dense one has one run of all lanes.
#pragma once
#include "mla.h"
#include "product.h"

namespace headrace {

constexpr int64_t KEY_TILE = 128;

// A row of a tile: one query of one head.
struct MixRow {
    const float* weights;  // [KEY_TILE], of which `visible` count
    int64_t visible;
    float shrink;
    float* mixed;
};

struct AttentionScratch {
    std::vector<float> keys;    // [KEY_TILE, entry]
    std::vector<float> scores;  // [queries, KEY_TILE]
    std::vector<float> mixed;   // [heads, queries, rank16]
    std::vector<float> peak, total;
    std::vector<MixRow> rows;
    Scratch gemm;
};

// One block of queries of one sequence for heads [head_begin, head_end).
struct Queries {
    const float* q;  // [queries, heads, entry] absorbed and rotated
    float* out;      // [queries, heads · v padded]
    int64_t out_stride;
    int64_t count;
    int64_t first_position;
    const int64_t* table;
    int64_t head_begin, head_end;
};

struct Shape {
    int64_t entry;  // rank16 + rope16
    int64_t rank16;
};

// Pool entries of positions [start, start + count) as float32, dead lanes left alone; rows beyond count are zero.
template <class K>
void load_keys(const Model& model, const Layer& layer, int64_t layer_index, const Shape& shape, const uint8_t* rows,
               const int64_t* table, int64_t start, int64_t count, float* keys) {
    const int64_t width = model.rank + model.rope;
    for (int64_t k = 0; k < count; ++k) {
        const int64_t position = start + k;
        const uint8_t* row =
            rows + table[position / model.block_tokens] * model.row_bytes + layer_index * model.layer_bytes;
        const K* entry = reinterpret_cast<const K*>(row) + position % model.block_tokens * width;
        float* to = keys + k * shape.entry;
        for (int64_t r = 0; r < layer.num_entry_runs; ++r) {
            // A run lies wholly in the latent or in the rope part; the padding behind either stays zero.
            const int64_t first = layer.entry_runs[2 * r], count_lanes = layer.entry_runs[2 * r + 1];
            if (first < shape.rank16)
                copy_row(entry + first, to + first, std::min(count_lanes, model.rank - first));
            else
                copy_row(entry + model.rank + (first - shape.rank16), to + first,
                         std::min(count_lanes, model.rope - (first - shape.rank16)));
        }
    }
    if (count < KEY_TILE) std::fill(keys + count * shape.entry, keys + KEY_TILE * shape.entry, 0.0f);
}

// scores[m, 0 … visible) → weights, zero beyond; returns the sum in a fixed shape.
inline float softmax_row(float* scores, int64_t visible, float scale, float& peak, float& shrink) {
    for (int64_t k = visible; k < KEY_TILE; ++k) scores[k] = -INFINITY;
    vf top = vset(-INFINITY);
    for (int64_t k = 0; k < KEY_TILE; k += VL) top = vmax(top, vload(scores + k));
    const float new_peak = std::max(peak, vtop(top) * scale);
    vf sum = vzero();
    for (int64_t k = 0; k < KEY_TILE; k += VL) {
        vstore(scores + k, vexp(vfma(vload(scores + k), vset(scale), vset(-new_peak))));
        if (k + VL > visible)
            for (int64_t tail = std::max(visible, k); tail < k + VL; ++tail) scores[tail] = 0.0f;
        sum = vadd(sum, vload(scores + k));
    }
    if (peak == -INFINITY)
        shrink = 0.0f;
    else {
        float wide[VL];
        vstore(wide, vexp(vset(peak - new_peak)));
        shrink = wide[0];
    }
    peak = new_peak;
    return vsum(sum);
}

// mixed[lane …] = mixed · shrink + Σ_k weight[k] · keys[k, lane …] of M rows over 32 lanes, keys in order.
template <int M, int L>
inline void mix_lanes(const MixRow* rows, const float* keys, int64_t entry, int64_t lane) {
    vf acc[M][L];
    int64_t common = rows[0].visible;
    for (int m = 0; m < M; ++m) {
        common = std::min(common, rows[m].visible);
        for (int i = 0; i < L; ++i) acc[m][i] = vmul(vload(rows[m].mixed + lane + i * VL), vset(rows[m].shrink));
    }
    for (int64_t k = 0; k < common; ++k) {
        vf key[L];
#pragma GCC unroll 8
        for (int i = 0; i < L; ++i) {
            key[i] = vload(keys + k * entry + lane + i * VL);
            HEADRACE_HOLD(key[i]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const vf weight = vset(rows[m].weights[k]);
#pragma GCC unroll 8
            for (int i = 0; i < L; ++i) acc[m][i] = vfma(weight, key[i], acc[m][i]);
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int64_t k = common; k < rows[m].visible; ++k)
            for (int i = 0; i < L; ++i)
                acc[m][i] = vfma(vset(rows[m].weights[k]), vload(keys + k * entry + lane + i * VL), acc[m][i]);
        for (int i = 0; i < L; ++i) vstore(rows[m].mixed + lane + i * VL, acc[m][i]);
    }
}

template <int M>
inline void mix_rows(const MixRow* rows, const float* keys, int64_t entry, const int64_t* runs, int64_t num_runs) {
    constexpr int WIDE = VL == 16 ? 4 : 32 / VL;
    for (int64_t r = 0; r < num_runs; ++r) {
        int64_t lane = runs[2 * r];
        const int64_t end = lane + runs[2 * r + 1];
        for (; lane + WIDE * VL <= end; lane += WIDE * VL) mix_lanes<M, WIDE>(rows, keys, entry, lane);
        for (; lane < end; lane += VL) mix_lanes<M, 1>(rows, keys, entry, lane);
    }
}

inline void mix(const MixRow* rows, int64_t count, const float* keys, int64_t entry, const int64_t* runs,
                int64_t num_runs) {
    int64_t m = 0;
    for (; m + 3 <= count; m += 3) mix_rows<3>(rows + m, keys, entry, runs, num_runs);
    for (; m < count; ++m) mix_rows<1>(rows + m, keys, entry, runs, num_runs);
}

// Heads [begin, end) that meet the same lanes.
struct HeadGroup {
    int64_t begin, end;
    std::vector<Run<float>> score;
    const int64_t* value;
    int64_t num_value;
};

inline std::vector<HeadGroup> group_heads(const Layer& layer, int64_t begin, int64_t end, const float* keys,
                                          int64_t entry) {
    const auto same = [](const int64_t* runs, const int64_t* starts, int64_t a, int64_t b) {
        return starts[a + 1] - starts[a] == starts[b + 1] - starts[b] &&
               std::equal(runs + 2 * starts[a], runs + 2 * starts[a + 1], runs + 2 * starts[b]);
    };
    std::vector<HeadGroup> groups;
    for (int64_t head = begin; head < end; ++head) {
        if (!groups.empty() && same(layer.score_runs, layer.score_starts, head - 1, head) &&
            same(layer.value_runs, layer.value_starts, head - 1, head)) {
            groups.back().end = head + 1;
            continue;
        }
        HeadGroup group{head,
                        head + 1,
                        {},
                        layer.value_runs + 2 * layer.value_starts[head],
                        layer.value_starts[head + 1] - layer.value_starts[head]};
        for (int64_t r = layer.score_starts[head]; r < layer.score_starts[head + 1]; ++r)
            group.score.push_back(
                {keys + layer.score_runs[2 * r], entry, layer.score_runs[2 * r], layer.score_runs[2 * r + 1]});
        groups.push_back(std::move(group));
    }
    return groups;
}

template <class W, class K>
void attend(const Model& model, const Layer& layer, int64_t layer_index, const Shape& shape, const uint8_t* rows,
            const Queries& queries, AttentionScratch& scratch) {
    const int64_t heads = queries.head_end - queries.head_begin, count = queries.count;
    const auto size = [](std::vector<float>& buffer, int64_t wanted) {
        if (static_cast<int64_t>(buffer.size()) < wanted) buffer.resize(wanted);
        return buffer.data();
    };
    float* keys = size(scratch.keys, KEY_TILE * shape.entry);
    float* scores = size(scratch.scores, std::max(count, heads) * KEY_TILE);
    float* mixed = size(scratch.mixed, heads * count * shape.rank16);
    float* peak = size(scratch.peak, heads * count);
    float* total = size(scratch.total, heads * count);
    scratch.rows.resize(std::max(count, heads));
    std::fill(mixed, mixed + heads * count * shape.rank16, 0.0f);
    std::fill(peak, peak + heads * count, -INFINITY);
    std::fill(total, total + heads * count, 0.0f);
    const std::vector<HeadGroup> groups = group_heads(layer, queries.head_begin, queries.head_end, keys, shape.entry);

    const int64_t end = queries.first_position + count;
    for (int64_t start = 0; start < end; start += KEY_TILE) {
        const int64_t present = std::min(KEY_TILE, end - start);
        load_keys<K>(model, layer, layer_index, shape, rows, queries.table, start, present, keys);
        // A block of rows: many queries of one head, or all heads of a group for one query, whichever is longer.
        const auto block = [&](const HeadGroup& group, int64_t head, int64_t num_heads, int64_t query,
                               int64_t num_queries) {
            const int64_t lines = num_heads * num_queries;
            const int64_t stride = num_heads > 1 ? shape.entry : model.heads * shape.entry;
            const Panel<float> panel{
                group.score.data(), static_cast<int>(group.score.size()), KEY_TILE, scores, KEY_TILE, nullptr, false};
            const float* q = queries.q + (query * model.heads + head) * shape.entry;
            if (scratch.gemm.packed && lines >= PACKED_FROM)
                packed_rows<float>(q, stride, lines, panel, 0, present, scratch.gemm);
            else
                block_out<false>(q, stride, lines, panel, 0, present);
            for (int64_t line = 0; line < lines; ++line) {
                const int64_t m = num_heads > 1 ? query : query + line, h = num_heads > 1 ? head + line : head;
                const int64_t at = (h - queries.head_begin) * count + m;
                MixRow& row = scratch.rows[line];
                row = {scores + line * KEY_TILE, std::min(present, queries.first_position + m + 1 - start), 0.0f,
                       mixed + at * shape.rank16};
                const float sum =
                    softmax_row(scores + line * KEY_TILE, row.visible, model.softmax_scale, peak[at], row.shrink);
                total[at] = std::fma(total[at], row.shrink, sum);
            }
            mix(scratch.rows.data(), lines, keys, shape.entry, group.value, group.num_value);
        };
        // Queries before `start` see nothing of this tile.
        const int64_t first = std::max<int64_t>(0, start - queries.first_position);
        for (const HeadGroup& group : groups) {
            if (count - first >= group.end - group.begin)
                for (int64_t head = group.begin; head < group.end; ++head) block(group, head, 1, first, count - first);
            else
                for (int64_t query = first; query < count; ++query)
                    block(group, group.begin, group.end - group.begin, query, 1);
        }
    }

    const W* kv_b = static_cast<const W*>(layer.kv_b);
    for (int64_t h = 0; h < heads; ++h) {
        const int64_t head = queries.head_begin + h;
        float* of_head = mixed + h * count * shape.rank16;
        for (int64_t m = 0; m < count; ++m) {
            const vf inverse = vset(1.0f / total[h * count + m]);
            for (int64_t k = 0; k < shape.rank16; k += VL)
                vstore(of_head + m * shape.rank16 + k, vmul(vload(of_head + m * shape.rank16 + k), inverse));
        }
        const W* w = kv_b + (head * (model.nope + model.v) + model.nope) * model.rank;
        std::vector<Run<W>> runs;
        if (model.rank % PAD) {
            runs.push_back({w, model.rank, 0, model.rank});
        } else {
            const int64_t* value_runs = layer.value_runs + 2 * layer.value_starts[head];
            for (int64_t r = 0; r < layer.value_starts[head + 1] - layer.value_starts[head]; ++r)
                runs.push_back({w + value_runs[2 * r], model.rank, value_runs[2 * r], value_runs[2 * r + 1]});
        }
        const Panel<W> panel{runs.data(),
                             static_cast<int>(runs.size()),
                             model.v,
                             queries.out + head * model.v,
                             queries.out_stride,
                             nullptr,
                             false};
        panel_rows<W>(of_head, shape.rank16, count, panel, 0, model.v, scratch.gemm);
    }
}

}  // namespace headrace
