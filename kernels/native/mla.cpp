// One step of a DeepSeek-V3 decoder on CPU threads: embed, all layers, head, in one call that never touches Python.
#include <omp.h>

#include "decoder.h"

namespace headrace {
namespace {

template <class W, class K>
void run(const Model& model, const Step& step, Workspace& space) {
#pragma omp parallel num_threads(static_cast<int>(step.threads))
    Decoder<W, K>(model, step, space, omp_get_thread_num(), omp_get_num_threads()).run();
}

template <class T>
void product(const float* x, const T* w, float* y, int64_t m, int64_t n, int64_t k, bool packed) {
    const int64_t stride = round_up(k, PAD);
    std::vector<float> padded(m * stride, 0.0f);
    for (int64_t row = 0; row < m; ++row) std::copy(x + row * k, x + (row + 1) * k, padded.data() + row * stride);
    Scratch scratch;
    scratch.packed = packed;
    const Run<T> run{w, k, 0, k};
    panel_rows<T>(padded.data(), stride, m, Panel<T>{&run, 1, n, y, n, nullptr, false}, 0, n, scratch);
}

}  // namespace
}  // namespace headrace

extern "C" {

// Floats per vector: which instruction set the library was compiled for.
int64_t headrace_vector_lanes() { return headrace::VL; }

// Sizes of the descriptors, which the Python mirror must match.
void headrace_descriptor_sizes(int64_t* sizes) {
    sizes[0] = sizeof(headrace::Ffn);
    sizes[1] = sizeof(headrace::Layer);
    sizes[2] = sizeof(headrace::Model);
    sizes[3] = sizeof(headrace::Step);
}

// y [m, n] = x [m, k] · w [n, k]ᵀ on the calling thread, for tests and the self-test at load.
void headrace_product(const float* x, const void* w, float* y, int64_t m, int64_t n, int64_t k, int64_t weight_bytes,
                      int64_t packed) {
    if (weight_bytes == 4)
        headrace::product(x, static_cast<const float*>(w), y, m, n, k, packed != 0);
    else
        headrace::product(x, static_cast<const headrace::bf16*>(w), y, m, n, k, packed != 0);
}

// y = e^x, in place of libm's.
void headrace_exp(const float* x, float* y, int64_t count) {
    for (int64_t i = 0; i + headrace::VL <= count; i += headrace::VL)
        headrace::vstore(y + i, headrace::vexp(headrace::vload(x + i)));
}

void* headrace_workspace_new() { return new headrace::Workspace; }
void headrace_workspace_free(void* space) { delete static_cast<headrace::Workspace*>(space); }

void headrace_mla_step(const headrace::Model* model, const headrace::Step* step, void* workspace) {
    auto& space = *static_cast<headrace::Workspace*>(workspace);
    headrace::prepare(*model, *step, space);
    if (model->weight_bytes == 4)
        headrace::run<float, float>(*model, *step, space);
    else if (model->kv_bytes == 4)
        headrace::run<headrace::bf16, float>(*model, *step, space);
    else
        headrace::run<headrace::bf16, headrace::bf16>(*model, *step, space);
}

}  // extern "C"
