// One vector type for the machine the library is compiled on, with the few operations the kernels need.
// Every operation has a fixed order, so results depend on the instruction set but never on the shape of a call.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace headrace {

using bf16 = uint16_t;  // the upper half of a float

inline float widen(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest even. NaN stays NaN.
inline bf16 narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40);
    return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

constexpr int VL = 16;
using vf = __m512;
inline vf vzero() { return _mm512_setzero_ps(); }
inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline vf vload(const bf16* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vpow2(vf n) {  // 2^n of integral n
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline float vtop(vf x) { return _mm512_reduce_max_ps(x); }
inline __m256 fold(vf x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int VL = 8;
using vf = __m256;
inline vf vzero() { return _mm256_setzero_ps(); }
inline vf vset(float x) { return _mm256_set1_ps(x); }
inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
inline vf vload(const bf16* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline void vstore(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vpow2(vf n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline __m256 fold(vf x) { return x; }
inline float vtop(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    s = _mm_max_ss(s, _mm_movehdup_ps(s));
    return _mm_cvtss_f32(s);
}

#else  // any other machine: four lanes, left to the compiler

constexpr int VL = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
inline vf vset(float x) { return vf{x, x, x, x}; }
inline vf vzero() { return vset(0.0f); }
inline vf vload(const float* p) {
    vf out;
    std::memcpy(&out, p, sizeof(out));
    return out;
}
inline vf vload(const bf16* p) { return vf{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
inline void vstore(float* p, vf x) { std::memcpy(p, &x, sizeof(x)); }
inline vf vfma(vf a, vf b, vf c) {
    vf out;
    for (int i = 0; i < VL; ++i) out[i] = std::fma(a[i], b[i], c[i]);
    return out;
}
inline vf vadd(vf a, vf b) { return a + b; }
inline vf vmul(vf a, vf b) { return a * b; }
inline vf vsub(vf a, vf b) { return a - b; }
inline vf vdiv(vf a, vf b) { return a / b; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vround(vf a) {
    vf out;
    for (int i = 0; i < VL; ++i) out[i] = std::nearbyint(a[i]);
    return out;
}
inline vf vpow2(vf n) {
    vf out;
    for (int i = 0; i < VL; ++i) out[i] = std::ldexp(1.0f, static_cast<int>(n[i]));
    return out;
}
inline float vsum(vf x) { return (x[0] + x[1]) + (x[2] + x[3]); }
inline void vsum4(const vf& a, const vf& b, const vf& c, const vf& d, float* out) {
    out[0] = vsum(a), out[1] = vsum(b), out[2] = vsum(c), out[3] = vsum(d);
}
inline float vtop(vf x) { return std::fmax(std::fmax(x[0], x[1]), std::fmax(x[2], x[3])); }

#endif

#if defined(__AVX2__) || defined(__AVX512F__)
// Four sums at once, each by the tree of vsum: neighbours, then neighbours of those, then the two halves.
inline void vsum4(const vf& a, const vf& b, const vf& c, const vf& d, float* out) {
    const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
}
inline float vsum(vf x) {
    const __m256 pairs = _mm256_hadd_ps(fold(x), fold(x));
    const __m256 quads = _mm256_hadd_ps(pairs, pairs);
    return _mm_cvtss_f32(_mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
}
#endif

// Keep a loaded vector in its register. Left alone, the compiler folds the load into each use again, and a tile then
// waits for the load ports instead of the multipliers (measured on AVX2: 3 × 4 tiles 78 GFLOP/s instead of 56).
#if defined(__AVX512F__)
#define HEADRACE_HOLD(x) asm("" : "+v"(x))
#elif defined(__AVX2__) && defined(__FMA__)
#define HEADRACE_HOLD(x) asm("" : "+x"(x))
#else
#define HEADRACE_HOLD(x) ((void)0)
#endif

// e^x for x ≤ 88: range reduction by ln 2 in two parts, then a polynomial of degree 6 (relative error about 2e-7).
// Below −87 the result is e^−87, about 1e-38.
inline vf vexp(vf x) {
    x = vmax(vmin(x, vset(88.0f)), vset(-87.0f));
    const vf n = vround(vmul(x, vset(1.44269504088896341f)));
    vf r = vfma(n, vset(-0.693359375f), x);
    r = vfma(n, vset(2.12194440e-4f), r);
    vf p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(p, vmul(r, r), vadd(r, vset(1.0f)));
    return vmul(p, vpow2(n));
}

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace headrace
