// Softmax over step-0 scores merged with a row's own keys, and its gradients.
#include "kernels.h"

extern "C" {

// scores [heads, rows, group, columns] become weights. own [places, heads, rows, group], of which the first `unused`
// places are zero. Strides of queries (by head) and of own keys (by place, by head) count elements.
void merged_softmax(T* scores, const T* queries, const T* own_keys, const int64_t* firsts, const int64_t* limits,
                    float* own, float* lse, int64_t heads, int64_t rows, int64_t group, int64_t columns, int64_t places,
                    int64_t unused, int64_t width, int64_t query_stride, int64_t place_stride, int64_t head_stride) {
    float scale = 1.0f / std::sqrt(float(width));
    #pragma omp parallel
    {
        std::vector<float> room(width + group * places + columns);
        float *key = room.data(), *drafted = key + width, *wide = drafted + group * places;
        #pragma omp for collapse(2) schedule(static)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t row = 0; row < rows; row++) {
                for (int64_t place = unused; place < places; place++) {
                    widen(own_keys + place * place_stride + head * head_stride + row * width, key, width);
                    for (int64_t member = 0; member < group; member++) {
                        const T* query = queries + head * query_stride + (row * group + member) * width;
                        drafted[member * places + place] = dot(query, key, width) * scale;
                    }
                }
                int64_t first = firsts[row], end = limits[row] + 1;
                for (int64_t member = 0; member < group; member++) {
                    int64_t at = (head * rows + row) * group + member;
                    T* line = scores + at * columns;
                    float *mine = drafted + member * places, top = -std::numeric_limits<float>::infinity(), total = 0;
                    for (int64_t place = unused; place < places; place++) top = std::max(top, mine[place]);
                    #pragma omp simd reduction(max : top)
                    for (int64_t i = first; i < end; i++) top = std::max(top, load(line[i]) * scale);
                    #pragma omp simd reduction(+ : total)
                    for (int64_t i = first; i < end; i++) {
                        wide[i] = exponential(load(line[i]) * scale - top);
                        total += wide[i];
                    }
                    for (int64_t place = unused; place < places; place++)
                        total += mine[place] = exponential(mine[place] - top);
                    float inverse = 1.0f / total;
                    std::fill(line, line + first, T{});
                    #pragma omp simd
                    for (int64_t i = first; i < end; i++) store(line + i, wide[i] * inverse);
                    std::fill(line + end, line + columns, T{});
                    for (int64_t place = 0; place < places; place++)
                        own[place * heads * rows * group + at] = place < unused ? 0.0f : mine[place] * inverse;
                    lse[at] = top + std::log(total);
                }
            }
    }
}

void add_own_values(T* shared, const float* own, const T* own_values, int64_t heads, int64_t rows, int64_t group,
                    int64_t places, int64_t unused, int64_t width, int64_t place_stride, int64_t head_stride) {
    #pragma omp parallel
    {
        std::vector<float> room(width);
        float* sum = room.data();
        #pragma omp for collapse(2) schedule(static)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t row = 0; row < rows; row++)
                for (int64_t member = 0; member < group; member++) {
                    int64_t at = (head * rows + row) * group + member;
                    widen(shared + at * width, sum, width);
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
    #pragma omp parallel
    {
        std::vector<float> room((3 * group + 2) * width);
        float *q = room.data(), *g = q + group * width, *by_query = g + group * width, *key = by_query + group * width,
              *value = key + width;
        #pragma omp for collapse(2) schedule(static)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t row = 0; row < rows; row++) {
                int64_t start = (head * rows + row) * group;
                widen(queries + start * width, q, group * width);
                widen(gradient + start * width, g, group * width);
                for (int64_t member = 0; member < group; member++)
                    delta[start + member] = dot(out + (start + member) * width, g + member * width, width);
                std::fill(by_query, key, 0.0f);
                for (int64_t place = 0; place < places; place++) {
                    int64_t from = place * place_stride + head * head_stride + row * width;
                    int64_t to = ((place * heads + head) * rows + row) * width;
                    float *by_key = key_gradient + to, *by_value = value_gradient + to;
                    std::fill(by_key, by_key + width, 0.0f);
                    std::fill(by_value, by_value + width, 0.0f);
                    if (place < unused) continue;
                    widen(own_keys + from, key, width);
                    widen(own_values + from, value, width);
                    for (int64_t member = 0; member < group; member++) {
                        float *qm = q + member * width, *gm = g + member * width, *to_query = by_query + member * width;
                        float weight = exponential(dot(qm, key, width) * scale - lse[start + member]);
                        float slope = weight * (dot(gm, value, width) - delta[start + member]) * scale;
                        #pragma omp simd
                        for (int64_t i = 0; i < width; i++) {
                            to_query[i] += slope * key[i];
                            by_key[i] += slope * qm[i];
                            by_value[i] += weight * gm[i];
                        }
                    }
                }
                std::copy(by_query, key, query_gradient + start * width);
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

}  // extern "C"
