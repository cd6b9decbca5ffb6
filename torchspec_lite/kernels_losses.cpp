// Losses over a vocabulary, and the transposition of their weight gradient.
#include "kernels.h"

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

extern "C" {

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
