// Numbers and small tools of the CPU kernels (kernels_*.cpp), which are the elementwise pieces of a training step, each in
// as few passes over memory as it needs.
//
// kernels.py builds them with the machine's compiler. Every kernel has its definition in PyTorch under the same name
// (layer.py, attention.py, head_loss.py, teacher.py), which tests hold it against. T is the products' type, bf16 with
// -DBF16 and float without; arithmetic is fp32. Loops are written so that a compiler vectorises them; nothing here
// depends on one instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#include <omp.h>

struct bf16 { uint16_t bits; };
#ifdef BF16
typedef bf16 T;
#else
typedef float T;
#endif

static inline float load(float x) { return x; }
static inline float load(bf16 x) {
    uint32_t wide = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
static inline void store(float* to, float x) { *to = x; }
static inline void store(bf16* to, float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    to->bits = uint16_t(x == x ? rounded : 0x7fc0u);
}

// e**x to about 1e-7 for any x (Cephes' polynomial): a library call would not vectorise everywhere.
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    float clamped = x < -87.0f ? -87.0f : x;
    float n = std::floor(clamped * 1.44269504f + 0.5f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t power = uint32_t(int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return x < -87.0f ? 0.0f : p * scale;
}
static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

template <class A>
static inline float dot(const A* a, const float* b, int64_t width) {
    float sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += load(a[i]) * b[i];
    return sum;
}
static inline void widen(const T* from, float* to, int64_t width) {
    #pragma omp simd
    for (int64_t i = 0; i < width; i++) to[i] = load(from[i]);
}

#define EACH_ROW _Pragma("omp parallel for schedule(static)")
