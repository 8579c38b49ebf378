// The descriptors that Python fills (kernels/native/mla.py mirrors them field by field) for one step of an MLA decoder.
// All counts are int64; pointers to weights are float32 or bfloat16 as Model.weight_bytes says; everything else is
// float32.
#pragma once
#include <cstdint>

namespace headrace {

// A gated feed-forward network: down · (silu(gate x) ∘ up x).
struct Ffn {
    const void* gate;  // [inner, hidden]
    const void* up;    // [inner, hidden]
    const void* down;  // [hidden, inner]
    int64_t inner;
};

struct Layer {
    const float* attention_norm;
    const float* ffn_norm;
    const void* q_a;  // [q_rank, hidden], null without query compression
    const float* q_a_bias;
    const float* q_a_norm;
    const void* q;     // [heads · (nope + rope), q_rank or hidden]
    const void* kv_a;  // [rank + rope, hidden]
    const float* kv_a_bias;
    const float* kv_a_norm;  // null: latents are kept as they come
    const void* kv_b;        // [heads · (nope + v), rank]
    const void* o;           // [hidden, heads · v]
    const float* o_bias;
    const int64_t* q_runs;  // (first row, count) pairs of q that are not all zero
    int64_t num_q_runs;
    // Per head (first lane, count) pairs in the padded entry [rank16 ‖ rope16], multiples of 16 lanes:
    const int64_t* score_runs;    // lanes where a query can be non-zero
    const int64_t* score_starts;  // [heads + 1] into score_runs, in pairs
    const int64_t* value_runs;    // latent lanes that the value half of kv_b reads
    const int64_t* value_starts;
    const int64_t* entry_runs;  // union over heads of both
    int64_t num_entry_runs;
    const uint8_t* nope_live;  // [heads]: position-free scores exist
    const Ffn* ffns;           // one when dense, the routed experts otherwise
    int64_t num_ffns;
    const float* router;  // [experts, hidden], null when dense
    const float* router_bias;
    const Ffn* shared;  // null: no shared experts
};

struct Model {
    int64_t weight_bytes;  // 4 or 2
    int64_t kv_bytes;      // 4, or 2 with 2-byte weights
    int64_t hidden, heads, q_rank, rank, nope, rope, v, vocab, num_layers;
    int64_t interleaved, invariant;
    int64_t top_k, groups, top_groups, normalize;
    int64_t block_tokens, row_bytes, layer_bytes;
    float softmax_scale, eps, lora_eps, route_scale;
    const Layer* layers;
    const void* embedding;  // [vocab, hidden]
    const void* head;       // [vocab, hidden]
    const float* norm;
};

struct Step {
    int64_t tokens, sequences, num_logits, max_blocks;
    const int64_t* token_ids;     // [tokens]
    const int64_t* positions;     // [tokens]
    const int64_t* starts;        // [sequences]
    const int64_t* lengths;       // [sequences]
    const int64_t* block_tables;  // [sequences, max_blocks]
    const int64_t* logit_rows;    // [num_logits]
    const float* cos;             // [tokens, rope / 2]
    const float* sin;
    uint8_t* rows;  // the pool
    float* logits;  // [num_logits, vocab]
    int64_t threads;
};

}  // namespace headrace
