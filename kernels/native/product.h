// The one entry to matrix products: float32 X and Y; W in float32 or bfloat16, row-major as checkpoints are.
// X rows are padded with zeros to a multiple of PAD; W rows that are no multiple of VL go through a padded float32
// copy.
#pragma once
#include "dot.h"
#include "packed.h"

namespace headrace {

constexpr int64_t PACKED_FROM = 24;  // input rows from which packing pays

// Rows [begin, end) of a panel for all m rows of X.
template <class T>
void panel_rows(const float* x, int64_t x_stride, int64_t m, const Panel<T>& panel, int64_t begin, int64_t end,
                Scratch& scratch) {
    if (scratch.packed && m >= PACKED_FROM) return packed_rows<T>(x, x_stride, m, panel, begin, end, scratch);
    bool whole_vectors = true;
    int64_t width = 0;
    for (int r = 0; r < panel.num_runs; ++r) {
        whole_vectors = whole_vectors && panel.runs[r].length % VL == 0;
        width += panel.runs[r].length;
    }
    constexpr bool wide = sizeof(T) == sizeof(float);
    if (whole_vectors && m <= 2 * BLOCK_M) {
        // The first tile of X pulls a few rows of W in, the others find them in the first-level cache.
        const int64_t block = std::max<int64_t>(24576 / (width * static_cast<int64_t>(sizeof(T))) / 12 * 12, 12);
        for (int64_t row = begin; row < end; row += block)
            block_out<true>(x, x_stride, m, panel, row, std::min(end, row + block));
        return;
    }
    if (whole_vectors && wide && panel.num_runs == 1) {
        // A block of W rows stays in the second-level cache while X passes by.
        const int64_t block = std::clamp<int64_t>(49152 / width / 12 * 12, 12, 96);
        for (int64_t row = begin; row < end; row += block)
            blocks_out(x, x_stride, m, panel, row, std::min(end, row + block), scratch.partial);
        return;
    }
    // Float32 copy of a block of rows, sized for the second-level cache. Runs keep their places relative to VL: where
    // they are whole vectors the chains are those of the direct path.
    const int64_t padded = round_up(width, PAD);
    const int64_t block = std::clamp<int64_t>((m <= 16 ? 6144 : 49152) / padded / 12 * 12, 12, 96);
    float* copy = scratch.ensure(block * padded);
    for (int64_t row = begin; row < end; row += block) {
        const int64_t count = std::min(block, end - row);
        for (int64_t n = 0; n < count; ++n) {
            float* to = copy + n * padded;
            for (int r = 0; r < panel.num_runs; ++r) {
                copy_row(panel.runs[r].w + (row + n) * panel.runs[r].stride, to, panel.runs[r].length);
                to += panel.runs[r].length;
            }
            std::fill(to, copy + (n + 1) * padded, 0.0f);
        }
        // Consecutive runs of X become one; the copy stands at rows [row, row + count).
        std::vector<Run<float>> runs;
        int64_t at = 0;
        for (int r = 0; r < panel.num_runs; ++r) {
            const Run<T>& from = panel.runs[r];
            if (!runs.empty() && runs.back().x + runs.back().length == from.x)
                runs.back().length += from.length;
            else
                runs.push_back({copy + at - row * padded, padded, from.x, from.length});
            at += from.length;
        }
        if (runs.size() == 1) runs[0].length = round_up(runs[0].length, VL);
        const Panel<float> inner{
            runs.data(), static_cast<int>(runs.size()), panel.rows, panel.y, panel.y_stride, panel.bias, panel.add};
        blocks_out(x, x_stride, m, inner, row, row + count, scratch.partial);
    }
}

}  // namespace headrace
