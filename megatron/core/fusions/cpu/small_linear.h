// y = x W^T + b for few rows x: W is read once, as a stream, and never unpacked in memory.
//
// y[i][j] is one chain of multiply-adds over the vectors of x[i] and W[j] and one sum of its lanes.
// So its bits depend on x[i], W[j] and b[j] alone: not on the number of rows, tiles or threads.

INLINE F cached(const int8_t* p, int64_t n) {
#if LANES == 16
    return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)read<B>(p, n)));
#elif LANES == 8
    __m128i codes{};
    std::memcpy(&codes, p, n);
    return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
#else
    return __builtin_convertvector(read<B>(p, n), F);
#endif
}

constexpr int kOutputs = 4;                   // rows of W in a tile of registers
constexpr int kInputs = LANES == 16 ? 6 : 3;  // rows of x in it
constexpr int64_t kInputBytes = 1 << 18;      // of x, which stay in the cache for all rows of W

struct LinearCall {
    const float *x, *scales, *bias;  // scales: of groups of columns of W in int8, else null
    float* y;
    int64_t num_inputs, num_outputs, width, group;

    explicit LinearCall(const Call& c)
        : x(c.at<float>(0)), scales(c.at<float>(2)), bias(c.at<float>(3)), y(c.at<float>(4)),
          num_inputs(c.sizes[0]), num_outputs(c.sizes[1]), width(c.sizes[2]), group(c.sizes[3]) {}
};

// Multiply kM rows of x, from row i on, with kN rows of W, from row j on.
template <int kM, int kN, class W>
INLINE void multiply(const LinearCall& c, const W* weight, int64_t i, int64_t j) {
    constexpr bool kHasScales = sizeof(W) == 1;
    const float* x = c.x + i * c.width;
    const W* w = weight + j * c.width;
    F total[kM][kN] = {};
    F scale[kN];
    const auto add = [&](int64_t k, int64_t n) {
        F in_w[kN];
        for (int b = 0; b < kN; ++b) {
            // These columns in the next tile of W.  One row of x in float reads faster without.
            if (kM > 1 || sizeof(W) < 4) __builtin_prefetch(w + (b + kN) * c.width + k);
            in_w[b] = cached(w + b * c.width + k, n);
            if (kHasScales) in_w[b] *= scale[b];
        }
        for (int a = 0; a < kM; ++a) {
            const F in_x = cached(x + a * c.width + k, n);
            for (int b = 0; b < kN; ++b) total[a][b] += in_x * in_w[b];
        }
    };
    const int64_t groups = (c.width + c.group - 1) / c.group;
    for (int64_t g = 0, start = 0; g < groups; ++g, start += c.group) {
        if (kHasScales)
            for (int b = 0; b < kN; ++b) scale[b] = splat(c.scales[(j + b) * groups + g]);
        each(std::min(c.group, c.width - start),
             [&](int64_t k, int64_t n) { add(start + k, n); });
    }
    for (int a = 0; a < kM; ++a)
        for (int b = 0; b < kN; ++b)
            c.y[(i + a) * c.num_outputs + j + b] = sum(total[a][b]) + (c.bias ? c.bias[j + b] : 0.0f);
}

// Multiply the rows [i, stop) of x, at most kInputs of them, with kN rows of W.
template <int kM, int kN, class W>
INLINE void multiply_rows(const LinearCall& c, const W* weight, int64_t i, int64_t count, int64_t j) {
    if (count == kM) return multiply<kM, kN>(c, weight, i, j);
    if constexpr (kM > 1) multiply_rows<kM - 1, kN>(c, weight, i, count, j);
}

// Pointers: x (float) [m, k], W [n, k], scales of W in int8 (float) [n, groups], bias (float,
// optional) [n], y (float) [m, n].  Sizes: m, n, k, columns per group (k without scales).  Units
// are rows of W.
template <class W>
void small_linear(const Call& call, int64_t begin, int64_t end) {
    const LinearCall c(call);
    const W* weight = call.at<W>(1);
    const int64_t rows = std::max<int64_t>(kInputs, kInputBytes / (4 * c.width) / kInputs * kInputs);
    for (int64_t i = 0; i < c.num_inputs; i += rows) {
        const int64_t stop = std::min(c.num_inputs, i + rows);
        // Tiles of nearly equal height: 8 rows in two of 4.
        const int64_t tiles = (stop - i + kInputs - 1) / kInputs;
        for (int64_t j = begin; j < end; j += kOutputs)
            for (int64_t tile = 0, at = i; tile < tiles; ++tile) {
                const int64_t count = (stop - at) / (tiles - tile);
                if (j + kOutputs <= end)
                    multiply_rows<kInputs, kOutputs>(c, weight, at, count, j);
                else
                    for (int64_t k = j; k < end; ++k)
                        multiply_rows<kInputs, 1>(c, weight, at, count, k);
                at += count;
            }
    }
}
