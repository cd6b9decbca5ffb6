// The elementwise pieces of a training step for CPUs, each in as few passes over memory as it needs.
//
// kernels.py builds this with the machine's compiler; every function has its definition in PyTorch under the same name
// (layer.py, attention.py, head_loss.py, teacher.py), which tests hold it against. T is the
// products' type, bf16 with -DBF16 and float without; arithmetic is fp32. Loops are written so that a compiler vectorises them; nothing here depends on one instruction set.
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

// 16 x 16 floats turned in registers: halves of pairs of lines are exchanged, at distances 8, 4, 2 and 1.
typedef float line16 __attribute__((vector_size(64)));
typedef int32_t lanes16 __attribute__((vector_size(64)));
#define ALL_LANES(pick) pick(0), pick(1), pick(2), pick(3), pick(4), pick(5), pick(6), pick(7), pick(8), pick(9), \
    pick(10), pick(11), pick(12), pick(13), pick(14), pick(15)
template <int distance>
static inline void exchange(line16 (&lines)[16]) {
    #define LOW(lane) (lane) & distance ? 16 + (lane) - distance : (lane)
    #define HIGH(lane) (lane) & distance ? 16 + (lane) : (lane) + distance
    const lanes16 low = {ALL_LANES(LOW)}, high = {ALL_LANES(HIGH)};
    #pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (i & distance) continue;
        line16 a = lines[i], b = lines[i + distance];
        lines[i] = __builtin_shuffle(a, b, low);
        lines[i + distance] = __builtin_shuffle(a, b, high);
    }
}
static inline void turn(line16 (&lines)[16]) {
    exchange<8>(lines);
    exchange<4>(lines);
    exchange<2>(lines);
    exchange<1>(lines);
}

#define EACH_ROW _Pragma("omp parallel for schedule(static)")

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

static inline float dot(const float* a, const float* b, int64_t width) {
    float sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += a[i] * b[i];
    return sum;
}
static inline void widen(const T* from, float* to, int64_t width) {
    #pragma omp simd
    for (int64_t i = 0; i < width; i++) to[i] = load(from[i]);
}

// scores [heads, rows, group, columns] become weights. own [places, heads, rows, group], of which the first `unused`
// places are zero. Strides of queries (by head) and of own keys (by place, by head) count elements.
void merged_softmax(T* scores, const T* queries, const T* own_keys, const int64_t* firsts, const int64_t* limits,
                    float* own, float* lse, int64_t heads, int64_t rows, int64_t group, int64_t columns, int64_t places,
                    int64_t unused, int64_t width, int64_t query_stride, int64_t place_stride, int64_t head_stride) {
    float scale = 1.0f / std::sqrt(float(width));
    #pragma omp parallel for collapse(2) schedule(static)
    for (int64_t head = 0; head < heads; head++)
        for (int64_t row = 0; row < rows; row++) {
            std::vector<float> room(2 * width + places + columns);
            float *q = room.data(), *key = q + width, *drafted = key + width, *wide = drafted + places;
            int64_t first = firsts[row], end = limits[row] + 1;
            for (int64_t member = 0; member < group; member++) {
                int64_t at = (head * rows + row) * group + member;
                T* line = scores + at * columns;
                widen(queries + head * query_stride + (row * group + member) * width, q, width);
                float top = -std::numeric_limits<float>::infinity(), total = 0;
                for (int64_t place = unused; place < places; place++) {
                    widen(own_keys + place * place_stride + head * head_stride + row * width, key, width);
                    drafted[place] = dot(q, key, width) * scale;
                    top = std::max(top, drafted[place]);
                }
                #pragma omp simd reduction(max : top)
                for (int64_t i = first; i < end; i++) top = std::max(top, load(line[i]) * scale);
                #pragma omp simd reduction(+ : total)
                for (int64_t i = first; i < end; i++) {
                    wide[i] = exponential(load(line[i]) * scale - top);
                    total += wide[i];
                }
                for (int64_t place = unused; place < places; place++)
                    total += drafted[place] = exponential(drafted[place] - top);
                float inverse = 1.0f / total;
                std::fill(line, line + first, T{});
                #pragma omp simd
                for (int64_t i = first; i < end; i++) store(line + i, wide[i] * inverse);
                std::fill(line + end, line + columns, T{});
                for (int64_t place = 0; place < places; place++)
                    own[place * heads * rows * group + at] = place < unused ? 0.0f : drafted[place] * inverse;
                lse[at] = top + std::log(total);
            }
        }
}

void add_own_values(T* shared, const float* own, const T* own_values, int64_t heads, int64_t rows, int64_t group,
                    int64_t places, int64_t unused, int64_t width, int64_t place_stride, int64_t head_stride) {
    #pragma omp parallel for collapse(2) schedule(static)
    for (int64_t head = 0; head < heads; head++)
        for (int64_t row = 0; row < rows; row++) {
            std::vector<float> sum(width);
            for (int64_t member = 0; member < group; member++) {
                int64_t at = (head * rows + row) * group + member;
                widen(shared + at * width, sum.data(), width);
                for (int64_t place = unused; place < places; place++) {
                    const T* value = own_values + place * place_stride + head * head_stride + row * width;
                    float weight = own[place * heads * rows * group + at];
                    #pragma omp simd
                    for (int64_t i = 0; i < width; i++) sum[i] += weight * load(value[i]);
                }
                #pragma omp simd
                for (int64_t i = 0; i < width; i++) store(shared + at * width + i, sum[i]);
            }
        }
}

void own_backward(const T* gradient, const T* out, const float* lse, const T* queries, const T* own_keys,
                  const T* own_values, float* query_gradient, float* delta, float* key_gradient, float* value_gradient,
                  int64_t heads, int64_t rows, int64_t group, int64_t places, int64_t unused, int64_t width,
                  int64_t place_stride, int64_t head_stride) {
    float scale = 1.0f / std::sqrt(float(width));
    #pragma omp parallel for collapse(2) schedule(static)
    for (int64_t head = 0; head < heads; head++)
        for (int64_t row = 0; row < rows; row++) {
            std::vector<float> q(width), g(width), key(width), value(width), by_query(width);
            for (int64_t place = 0; place < places; place++) {
                int64_t to = ((place * heads + head) * rows + row) * width;
                std::fill(key_gradient + to, key_gradient + to + width, 0.0f);
                std::fill(value_gradient + to, value_gradient + to + width, 0.0f);
            }
            for (int64_t member = 0; member < group; member++) {
                int64_t at = (head * rows + row) * group + member;
                widen(queries + at * width, q.data(), width);
                widen(gradient + at * width, g.data(), width);
                widen(out + at * width, value.data(), width);
                std::fill(by_query.begin(), by_query.end(), 0.0f);
                float inner = delta[at] = dot(g.data(), value.data(), width);
                for (int64_t place = unused; place < places; place++) {
                    int64_t from = place * place_stride + head * head_stride + row * width;
                    widen(own_keys + from, key.data(), width);
                    widen(own_values + from, value.data(), width);
                    float weight = exponential(dot(q.data(), key.data(), width) * scale - lse[at]);
                    float slope = weight * (dot(g.data(), value.data(), width) - inner) * scale;
                    int64_t to = ((place * heads + head) * rows + row) * width;
                    float *by_key = key_gradient + to, *by_value = value_gradient + to;
                    #pragma omp simd
                    for (int64_t i = 0; i < width; i++) {
                        by_query[i] += slope * key[i];
                        by_key[i] += slope * q[i];
                        by_value[i] += weight * g[i];
                    }
                }
                std::copy(by_query.begin(), by_query.end(), query_gradient + at * width);
            }
        }
}

// scores become weights and slopes the scores' gradients, in place; lse and delta with a stride by head.
void softmax_backward(T* scores, T* slopes, const float* lse, const float* delta, const int64_t* firsts,
                      const int64_t* limits, int64_t heads, int64_t rows, int64_t group, int64_t columns, int64_t width,
                      int64_t stride) {
    float scale = 1.0f / std::sqrt(float(width));
    #pragma omp parallel for collapse(2) schedule(static)
    for (int64_t head = 0; head < heads; head++)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t member = 0; member < group; member++) {
                int64_t at = (head * rows + row) * group + member, from = head * stride + row * group + member;
                T *line = scores + at * columns, *slope = slopes + at * columns;
                int64_t first = firsts[row], end = limits[row] + 1;
                float top = lse[from], inner = delta[from];
                #pragma omp simd
                for (int64_t i = 0; i < first; i++) { store(line + i, 0.0f); store(slope + i, 0.0f); }
                #pragma omp simd
                for (int64_t i = first; i < end; i++) {
                    float weight = exponential(load(line[i]) * scale - top);
                    store(line + i, weight);
                    store(slope + i, weight * (load(slope[i]) - inner) * scale);
                }
                #pragma omp simd
                for (int64_t i = end; i < columns; i++) { store(line + i, 0.0f); store(slope + i, 0.0f); }
            }
}

// Maximum of a line and its first place.
static inline float largest(const T* line, int64_t width, int64_t* place) {
    const int64_t block = 512;
    float top = -std::numeric_limits<float>::infinity();
    int64_t start = 0;
    for (int64_t from = 0; from < width; from += block) {
        float here = -std::numeric_limits<float>::infinity();
        int64_t end = std::min(from + block, width);
        #pragma omp simd reduction(max : here)
        for (int64_t i = from; i < end; i++) here = std::max(here, load(line[i]));
        if (here > top) { top = here; start = from; }
    }
    while (start < width - 1 && load(line[start]) != top) start++;
    *place = start;
    return top;
}

void summary(const T* logits, float* lse, int64_t* best, int64_t rows, int64_t width) {
    EACH_ROW
    for (int64_t row = 0; row < rows; row++) {
        const T* line = logits + row * width;
        float top = largest(line, width, best + row), total = 0;
        #pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < width; i++) total += exponential(load(line[i]) - top);
        lse[row] = top + std::log(total);
    }
}

void restricted_probabilities(const T* logits, const float* lse, float* p, int64_t rows, int64_t width) {
    EACH_ROW
    for (int64_t row = 0; row < rows; row++)
        #pragma omp simd
        for (int64_t i = 0; i < width; i++) p[row * width + i] = exponential(load(logits[row * width + i]) - lse[row]);
}

// kind 0: cross-entropy, 1: total variation, 2: log acceptance. logits become gradients times scale.
void step_losses(int64_t kind, T* logits, const float* p, const int64_t* place, const float* scale, float* losses,
                 int64_t* best, int64_t rows, int64_t width) {
    #pragma omp parallel
    {
        std::vector<float> exponents(width);
        float* e = exponents.data();
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            T* line = logits + row * width;
            const float* target = p + place[row] * width;
            float top = largest(line, width, best + row), factor = scale[row];
            float total = 0, coverage = 0, product = 0;
            #pragma omp simd reduction(+ : total, coverage, product)
            for (int64_t i = 0; i < width; i++) {
                float x = load(line[i]) - top;
                e[i] = exponential(x);
                total += e[i];
                coverage += target[i];
                product += target[i] * x;
            }
            float inverse = 1.0f / total;
            if (kind == 0) {
                losses[row] = coverage * std::log(total) - product;
                float share = inverse * coverage;
                #pragma omp simd
                for (int64_t i = 0; i < width; i++) store(line + i, (e[i] * share - target[i]) * factor);
                continue;
            }
            float acceptance = 0, rising = 0;
            #pragma omp simd reduction(+ : acceptance, rising)
            for (int64_t i = 0; i < width; i++) {
                float q = e[i] * inverse;
                acceptance += std::min(q, target[i]);
                rising += q < target[i] ? q : 0.0f;
            }
            float floor = std::max(acceptance, 1e-8f);
            losses[row] = kind == 1 ? 1.0f - acceptance : -std::log(floor);
            if (kind == 2) factor /= floor;
            #pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float q = e[i] * inverse;
                store(line + i, q * (rising - (q < target[i] ? 1.0f : 0.0f)) * factor);
            }
        }
    }
}

void transposed(const T* x, float* out, int64_t rows, int64_t columns) {
    EACH_ROW
    for (int64_t top = 0; top < rows; top += 16)  // reads run along lines: their starts may share cache sets
        for (int64_t left = 0; left < columns; left += 16) {
            int64_t high = std::min<int64_t>(16, rows - top), wide = std::min<int64_t>(16, columns - left);
            line16 lines[16] = {};
            if (wide == 16)
                for (int64_t row = 0; row < high; row++) {
                    float line[16];
                    widen(x + (top + row) * columns + left, line, 16);
                    std::memcpy(&lines[row], line, 64);
                }
            else
                for (int64_t row = 0; row < high; row++)
                    for (int64_t column = 0; column < wide; column++)
                        lines[row][column] = load(x[(top + row) * columns + left + column]);
            turn(lines);
            for (int64_t column = 0; column < wide; column++)
                std::memcpy(out + (left + column) * rows + top, &lines[column], high * sizeof(float));
        }
}

}  // extern "C"
