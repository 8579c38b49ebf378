// Grouped routing without an auxiliary loss (noaux_tc, arXiv 2412.19437 §2.1.2) and the lists that dispatch tokens by
// expert.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "mla.h"

namespace headrace {

// Indices of the `count` largest values; of equal ones the lower index.
inline void pick(const float* values, int64_t size, int64_t count, int64_t* out) {
    std::vector<int64_t> order(size);
    for (int64_t i = 0; i < size; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
    std::copy(order.begin(), order.begin() + count, out);
}

// Experts outside the best groups become −∞; a group is as good as the sum of its two best.
inline void keep_best_groups(const Model& model, std::vector<float>& biased) {
    const int64_t size = static_cast<int64_t>(biased.size()) / model.groups;
    std::vector<float> best(model.groups);
    for (int64_t g = 0; g < model.groups; ++g) {
        std::vector<float> group(biased.begin() + g * size, biased.begin() + (g + 1) * size);
        std::sort(group.rbegin(), group.rend());
        best[g] = size > 1 ? group[0] + group[1] : group[0];
    }
    std::vector<int64_t> kept(model.top_groups);
    pick(best.data(), model.groups, model.top_groups, kept.data());
    for (int64_t g = 0; g < model.groups; ++g)
        if (std::find(kept.begin(), kept.end(), g) == kept.end())
            std::fill(biased.begin() + g * size, biased.begin() + (g + 1) * size, -INFINITY);
}

// Router logits of one token → its experts in ascending order, and their weights. Biased scores choose, unbiased weigh.
inline void choose_experts(const Model& model, std::vector<float>& scores, const float* bias, int64_t* chosen,
                           float* weights) {
    const int64_t experts = static_cast<int64_t>(scores.size());
    std::vector<float> biased(experts);
    for (int64_t e = 0; e < experts; ++e) {
        scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
        biased[e] = scores[e] + bias[e];
    }
    if (model.groups > 1) keep_best_groups(model, biased);
    pick(biased.data(), experts, model.top_k, chosen);
    std::sort(chosen, chosen + model.top_k);
    float sum = 1e-20f;
    for (int64_t k = 0; k < model.top_k; ++k) sum += scores[chosen[k]];
    for (int64_t k = 0; k < model.top_k; ++k)
        weights[k] = (model.normalize ? scores[chosen[k]] / sum : scores[chosen[k]]) * model.route_scale;
}

struct Routed {
    int64_t token;
    float weight;
};

// Routes sorted by expert, then by token.
struct Dispatch {
    std::vector<Routed> routed;
    std::vector<int64_t> start;  // [experts + 1]
    std::vector<int64_t> slot;   // [tokens, top_k] → place in `routed`

    void fill(const std::vector<int64_t>& chosen, const std::vector<float>& weights, int64_t top_k, int64_t experts) {
        const int64_t routes = static_cast<int64_t>(chosen.size());
        routed.resize(routes);
        slot.resize(routes);
        start.assign(experts + 1, 0);
        for (int64_t r = 0; r < routes; ++r) ++start[chosen[r] + 1];
        for (int64_t e = 0; e < experts; ++e) start[e + 1] += start[e];
        std::vector<int64_t> next(start.begin(), start.end() - 1);
        for (int64_t r = 0; r < routes; ++r) {
            slot[r] = next[chosen[r]]++;
            routed[slot[r]] = {r / top_k, weights[r]};
        }
    }
};

}  // namespace headrace
