// What a product is described by: stretches of W, where their results go, and a thread's scratch memory.
#pragma once
#include <algorithm>
#include <vector>

#include "vector.h"

namespace headrace {

constexpr int64_t PAD = 16;

// A stretch of the k axis: columns [x, x + length) of X meet W rows that start at `w`, `stride` elements apart.
template <class T>
struct Run {
    const T* w;
    int64_t stride;
    int64_t x;
    int64_t length;
};

// Rows [0, rows) of W go to columns [out …) of Y.
template <class T>
struct Panel {
    const Run<T>* runs;
    int num_runs;
    int64_t rows;
    float* y;  // column 0 of this panel
    int64_t y_stride;
    const float* bias;  // [rows] or null
    bool add;           // Y += instead of Y =
};

// Scratch of one thread, grown on demand.
struct Scratch {
    bool packed = false;  // large products may run in packed.h's order
    std::vector<float> partial;
    std::vector<float> panel;
    float* ensure(int64_t count) {
        if (static_cast<int64_t>(panel.size()) < count) panel.resize(count);
        return panel.data();
    }
};

inline void copy_row(const float* from, float* to, int64_t count) { std::memcpy(to, from, count * sizeof(float)); }
inline void copy_row(const bf16* from, float* to, int64_t count) {
    int64_t k = 0;
    for (; k + VL <= count; k += VL) vstore(to + k, vload(from + k));
    for (; k < count; ++k) to[k] = widen(from[k]);
}

}  // namespace headrace
