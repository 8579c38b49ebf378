// Y[m, n] = Σ_k X[m, k] · W[n, k], each output one chain of vector FMAs over k and one fixed tree of sums, whatever
// tile it is computed in: a row of Y does not depend on the rows beside it, the number of threads, or the place in a
// chunk (law L5).
#pragma once
#include <type_traits>

#include "panel.h"

namespace headrace {

// acc[m][n] += Σ over the runs. Ahead: the rows of the next tile are asked for, for calls that wait for memory (streams
// of one row are too short for the hardware to notice: 8 → 15 GB/s for one input of width 576).
template <bool Ahead, int M, int N, class T>
inline void accumulate(const float* x, int64_t x_stride, const Run<T>* runs, int num_runs, int64_t row,
                       vf (&acc)[M][N]) {
    for (int r = 0; r < num_runs; ++r) {
        const Run<T>& run = runs[r];
        const T* w = run.w + row * run.stride;
        const float* at = x + run.x;
        for (int64_t k = 0; k < run.length; k += VL) {
            vf xs[M];
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                xs[m] = vload(at + m * x_stride + k);
                HEADRACE_HOLD(xs[m]);
            }
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) {
                if constexpr (Ahead) __builtin_prefetch(w + (n + N) * run.stride + k);
                vf weight = vload(w + n * run.stride + k);
                HEADRACE_HOLD(weight);
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) acc[m][n] = vfma(xs[m], weight, acc[m][n]);
            }
        }
    }
}

// Input rows per tile, and output rows for M input rows: enough independent chains to hide the FMA latency, and all of
// them, the inputs and one weight in registers (16 on AVX2, 32 on AVX-512).
#if defined(__AVX512F__)
constexpr int TILE_M = 4;
constexpr int tile_rows(int m) { return m == 1 ? 12 : m == 2 ? 8 : 6; }
#else
constexpr int TILE_M = 3;
constexpr int tile_rows(int m) { return m == 1 ? 8 : 4; }
#endif
constexpr int64_t BLOCK_M = 2 * TILE_M;  // input rows that pass a block of weights together

template <bool Ahead, int M, int N, class T>
inline void tile_out(const float* x, int64_t x_stride, const Panel<T>& panel, int64_t row, int64_t m0) {
    vf acc[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = vzero();
    accumulate<Ahead, M, N, T>(x, x_stride, panel.runs, panel.num_runs, row, acc);
    for (int m = 0; m < M; ++m) {
        float* y = panel.y + (m0 + m) * panel.y_stride + row;
        float sums[N];
        int n = 0;
        for (; n + 4 <= N; n += 4) vsum4(acc[m][n], acc[m][n + 1], acc[m][n + 2], acc[m][n + 3], sums + n);
        for (; n < N; ++n) sums[n] = vsum(acc[m][n]);
        for (n = 0; n < N; ++n) {
            const float value = panel.bias ? sums[n] + panel.bias[row + n] : sums[n];
            y[n] = panel.add ? y[n] + value : value;
        }
    }
}

template <bool Ahead, int M, class T>
inline void rows_out(const float* x, int64_t x_stride, const Panel<T>& panel, int64_t begin, int64_t end, int64_t m0) {
    constexpr int N = tile_rows(M);
    int64_t row = begin;
    for (; row + N <= end; row += N) tile_out<Ahead, M, N, T>(x, x_stride, panel, row, m0);
    for (; row < end; ++row) tile_out<false, M, 1, T>(x, x_stride, panel, row, m0);
}

template <bool Ahead, class T>
inline void block_out(const float* x, int64_t x_stride, int64_t m, const Panel<T>& panel, int64_t begin, int64_t end) {
    for (int64_t m0 = 0; m0 < m;) {
        const float* from = x + m0 * x_stride;
        const int64_t rest = m - m0;
        if (rest >= TILE_M && rest != TILE_M + 1) {
            rows_out<Ahead, TILE_M, T>(from, x_stride, panel, begin, end, m0);
            m0 += TILE_M;
        } else if (rest >= 2) {  // a full tile and one row would leave the last one alone with all the weights
            rows_out<Ahead, 2, T>(from, x_stride, panel, begin, end, m0);
            m0 += 2;
        } else {
            rows_out<Ahead, 1, T>(from, x_stride, panel, begin, end, m0);
            m0 += 1;
        }
    }
}

// All m rows over a block of weights that the second-level cache holds. A long k axis is cut so that the tiles of a cut
// stay in the first-level cache; the chains wait in `partial` in between, so the cut does not show in the result.
constexpr int64_t K_CUT = 768;

template <int M, class T>
inline void cut_rows(const float* x, int64_t x_stride, const Run<T>& cut, int64_t begin, int64_t end, float* partial,
                     bool first) {
    const auto tile = [&](auto width, int64_t row) {
        constexpr int N = decltype(width)::value;
        vf acc[M][N];
        float* kept = partial + (row - begin) * M * VL;
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) acc[m][n] = first ? vzero() : vload(kept + (n * M + m) * VL);
        accumulate<false, M, N, T>(x, x_stride, &cut, 1, row, acc);
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) vstore(kept + (n * M + m) * VL, acc[m][n]);
    };
    constexpr int N = tile_rows(M);
    int64_t row = begin;
    for (; row + N <= end; row += N) tile(std::integral_constant<int, N>(), row);
    for (; row < end; ++row) tile(std::integral_constant<int, 1>(), row);
}

template <class T>
inline void blocks_out(const float* x, int64_t x_stride, int64_t m, Panel<T> panel, int64_t begin, int64_t end,
                       std::vector<float>& kept) {
    kept.resize(96 * TILE_M * VL);
    float* partial = kept.data();
    int64_t m0 = 0;
    if (panel.num_runs == 1 && panel.runs[0].length > K_CUT) {
        for (; m0 + TILE_M <= m; m0 += TILE_M) {
            const Run<T>& run = panel.runs[0];
            for (int64_t k = 0; k < run.length; k += K_CUT) {
                const Run<T> cut{run.w + k, run.stride, run.x + k, std::min(K_CUT, run.length - k)};
                cut_rows<TILE_M, T>(x + m0 * x_stride, x_stride, cut, begin, end, partial, k == 0);
            }
            for (int64_t row = begin; row < end; ++row)
                for (int i = 0; i < TILE_M; ++i) {
                    float* y = panel.y + (m0 + i) * panel.y_stride + row;
                    const float sum = vsum(vload(partial + ((row - begin) * TILE_M + i) * VL));
                    const float value = panel.bias ? sum + panel.bias[row] : sum;
                    *y = panel.add ? *y + value : value;
                }
        }
        panel.y += m0 * panel.y_stride;
    }
    for (; m0 < m; m0 += BLOCK_M) {
        block_out<false>(x + m0 * x_stride, x_stride, std::min(BLOCK_M, m - m0), panel, begin, end);
        panel.y += BLOCK_M * panel.y_stride;
    }
}

}  // namespace headrace
