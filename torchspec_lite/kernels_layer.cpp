// The drafter's layer: norms, RoPE, the gated MLP.
#include "kernels.h"

extern "C" {

void norm(const T* x, const T* branch, const float* weight, float eps, T* total, T* out, int64_t rows, int64_t width) {
    EACH_ROW
    for (int64_t row = 0; row < rows; row++) {
        const T* from = x + row * width;
        const T* more = branch ? branch + row * width : nullptr;
        T* to = out + row * width;
        std::vector<float> wide(width);
        float squares = 0;
        #pragma omp simd
        for (int64_t i = 0; i < width; i++) wide[i] = load(from[i]);
        if (more) {
            T* sum = total + row * width;
            #pragma omp simd
            for (int64_t i = 0; i < width; i++) { wide[i] += load(more[i]); store(sum + i, wide[i]); }
        }
        #pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += wide[i] * wide[i];
        float inverse = 1.0f / std::sqrt(squares / width + eps);
        if (weight)
            #pragma omp simd
            for (int64_t i = 0; i < width; i++) store(to + i, wide[i] * inverse * weight[i]);
        else
            #pragma omp simd
            for (int64_t i = 0; i < width; i++) store(to + i, wide[i] * inverse);
    }
}

void norm_backward(const T* gradient, const T* x, const float* weight, float eps, const T* around, T* out,
                   float* weight_gradient, int64_t rows, int64_t width) {
    std::vector<float> sums(size_t(omp_get_max_threads()) * width, 0.0f);
    #pragma omp parallel
    {
        float* sum = sums.data() + omp_get_thread_num() * width;
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const T *g = gradient + row * width, *from = x + row * width, *past = around + row * width;
            T* to = out + row * width;
            float squares = 0, product = 0;
            #pragma omp simd reduction(+ : squares, product)
            for (int64_t i = 0; i < width; i++) {
                squares += load(from[i]) * load(from[i]);
                product += load(g[i]) * weight[i] * load(from[i]);
            }
            float inverse = 1.0f / std::sqrt(squares / width + eps);
            float mean = product * inverse * inverse / width;
            #pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float slope = load(g[i]), wide = load(from[i]);
                sum[i] += slope * wide * inverse;
                store(to + i, inverse * (slope * weight[i] - wide * mean) + load(past[i]));
            }
        }
    }
    std::fill(weight_gradient, weight_gradient + width, 0.0f);
    for (size_t at = 0; at < sums.size(); at++) weight_gradient[at % width] += sums[at];
}

void split_rotate(const T* qkv, const T* embedded, const int64_t* places, const float* cos, const float* sin, T* queries,
                  T* keys, T* values, int64_t rows, int64_t kv_heads, int64_t group, int64_t half) {
    int64_t width = 2 * half, heads = kv_heads * (group + 2), columns = heads * width;
    EACH_ROW
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cos + row * half, *s = sin + row * half;
        for (int64_t head = 0; head < heads; head++) {
            const T* from = qkv + row * columns + head * width;
            const T* token = embedded + places[row] * columns + head * width;
            int64_t kind = head < kv_heads * group ? 0 : head < kv_heads * (group + 1) ? 1 : 2;
            int64_t key = kind == 0 ? head / group : head - kv_heads * (group + kind - 1);
            T* to = kind == 0 ? queries + ((key * rows + row) * group + head % group) * width
                              : (kind == 1 ? keys : values) + (key * rows + row) * width;
            if (kind == 2) for (int64_t i = 0; i < width; i++) store(to + i, load(from[i]) + load(token[i]));
            else
                #pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                float first = load(from[i]) + load(token[i]), second = load(from[half + i]) + load(token[half + i]);
                store(to + i, first * c[i] - second * s[i]);
                store(to + half + i, second * c[i] + first * s[i]);
            }
        }
    }
}

void split_rotate_backward(const T* queries, const float* keys, const float* values, const float* cos, const float* sin,
                           T* out, int64_t rows, int64_t kv_heads, int64_t group, int64_t half) {
    int64_t width = 2 * half, columns = kv_heads * (group + 2) * width;
    EACH_ROW
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cos + row * half, *s = sin + row * half;
        T* to = out + row * columns;
        for (int64_t head = 0; head < kv_heads * group; head++, to += width) {
            const T* from = queries + ((head / group * rows + row) * group + head % group) * width;
            #pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float first = load(from[i]), second = load(from[half + i]);
                store(to + i, first * c[i] + second * s[i]);
                store(to + half + i, second * c[i] - first * s[i]);
            }
        }
        for (int64_t head = 0; head < kv_heads; head++, to += width) {
            const float* from = keys + (head * rows + row) * width;
            #pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                store(to + i, from[i] * c[i] + from[half + i] * s[i]);
                store(to + half + i, from[half + i] * c[i] - from[i] * s[i]);
            }
        }
        for (int64_t head = 0; head < kv_heads; head++, to += width) {
            const float* from = values + (head * rows + row) * width;
            #pragma omp simd
            for (int64_t i = 0; i < width; i++) store(to + i, from[i]);
        }
    }
}

void gated(const T* gate_up, T* out, int64_t rows, int64_t inner) {
    EACH_ROW
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * inner, *up = gate + inner;
        T* to = out + row * inner;
        #pragma omp simd
        for (int64_t i = 0; i < inner; i++) store(to + i, load(gate[i]) * sigmoid(load(gate[i])) * load(up[i]));
    }
}

void gated_backward(const T* gradient, const T* gate_up, T* out, int64_t rows, int64_t inner) {
    EACH_ROW
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * inner, *up = gate + inner, *g = gradient + row * inner;
        T *by_gate = out + row * 2 * inner, *by_up = by_gate + inner;
        #pragma omp simd
        for (int64_t i = 0; i < inner; i++) {
            float x = load(gate[i]), slope = load(g[i]), open = sigmoid(x);
            store(by_gate + i, slope * load(up[i]) * open * (1.0f + x * (1.0f - open)));
            store(by_up + i, slope * x * open);
        }
    }
}

}  // extern "C"
