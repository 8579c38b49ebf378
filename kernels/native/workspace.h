// What a decoder keeps between steps: buffers that grow to the largest step, and each thread's scratch.
#pragma once
#include <atomic>
#include <memory>

#include "attention.h"
#include "mla.h"
#include "route.h"

namespace headrace {

constexpr int64_t FEW_ROWS = 16;  // up to here each thread normalises all rows itself and a barrier is saved

struct Buffer {
    std::vector<float> data;
    // Grown zeroed. Pads behind a row are never written, so they stay zero as long as the stride does.
    float* ensure(int64_t count) {
        if (static_cast<int64_t>(data.size()) < count) data.assign(count, 0.0f);
        return data.data();
    }
};

struct ThreadState {
    Scratch gemm;
    AttentionScratch attention;
    Buffer normed, gate, up;
};

struct Workspace {
    std::vector<ThreadState> threads;
    Buffer x, normed, q_low, q, kv, absorbed, attended, act, expert_in, expert_act, expert_out, weights;
    std::vector<int64_t> chosen;       // [tokens, top_k], ascending
    std::vector<float> chosen_weight;  // [tokens, top_k]
    Dispatch dispatch;
    std::unique_ptr<std::atomic<int64_t>[]> counters;
    int64_t num_counters = 0;
};

// Room for a step; called before its threads start.
inline void prepare(const Model& model, const Step& step, Workspace& space) {
    const int64_t tokens = step.tokens, hidden = round_up(model.hidden, PAD);
    const int64_t rows = std::max(tokens, step.num_logits);
    const int64_t widest = std::max(hidden, round_up(model.q_rank, PAD));
    int64_t act = 0, routes = 0, expert_act = 0, experts = 0;
    for (int64_t i = 0; i < model.num_layers; ++i) {
        const Layer& layer = model.layers[i];
        const bool sparse = layer.router && model.top_k < layer.num_ffns;
        const int64_t inner = layer.ffns[0].inner;
        if (layer.router) experts = std::max(experts, layer.num_ffns);
        if (sparse) {
            routes = tokens * model.top_k;
            expert_act = std::max(expert_act, round_up(inner, PAD));
        } else {
            act = std::max(act, round_up(inner * layer.num_ffns, PAD));
        }
        if (layer.shared) act = std::max(act, round_up(layer.shared->inner, PAD));
    }
    const int64_t entry = round_up(model.rank, PAD) + round_up(model.rope, PAD);
    space.x.ensure(tokens * hidden);
    space.normed.ensure(rows * widest);
    space.q_low.ensure(tokens * round_up(model.q_rank, PAD));
    space.q.ensure(tokens * round_up(model.heads * (model.nope + model.rope), PAD));
    space.kv.ensure(tokens * round_up(model.rank + model.rope, PAD));
    space.absorbed.ensure(tokens * model.heads * entry);
    space.attended.ensure(tokens * round_up(model.heads * model.v, PAD));
    space.act.ensure(tokens * act);
    space.expert_in.ensure(routes * hidden);
    space.expert_act.ensure(routes * expert_act);
    space.expert_out.ensure(routes * hidden);
    space.chosen.resize(experts ? tokens * model.top_k : 0);
    space.chosen_weight.resize(experts ? tokens * model.top_k : 0);
    if (static_cast<int64_t>(space.threads.size()) < step.threads) space.threads.resize(step.threads);
    for (ThreadState& state : space.threads) {
        state.normed.ensure(FEW_ROWS * widest);
        state.gemm.packed = state.attention.gemm.packed = !model.invariant;
    }
    if (space.num_counters < 3 * model.num_layers) {
        space.num_counters = 3 * model.num_layers;
        space.counters = std::make_unique<std::atomic<int64_t>[]>(space.num_counters);
    }
    for (int64_t i = 0; i < space.num_counters; ++i) space.counters[i] = 0;
}

}  // namespace headrace
