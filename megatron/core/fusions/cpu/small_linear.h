// y = x W^T + b.  Few rows x are limited by the bandwidth with which W is read (`stream`), many rows
// by multiply-adds (`reuse`).
//
// y[i][j] is one chain of multiply-adds for each lane over the vectors of x[i] and W[j], and then one
// sum of the lanes.  So its bits depend on x[i], W[j] and b[j] alone: not on the number of rows,
// blocks, tiles or threads.

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
constexpr int64_t kStreamed = 3 * kInputs;    // most rows of x for which `stream` is faster
constexpr int64_t kDepth = 768;               // columns of a tile of x that stays in the L1 cache
constexpr int64_t kCopyBytes = 3 << 17;       // of W as floats in a block, which stays in the L2 cache
constexpr int64_t kAheadBytes = 2048;         // of each row of W

struct LinearCall {
    const float *x, *scales, *bias;  // scales: of groups of columns of W in int8, else null
    float* y;
    int64_t num_inputs, num_outputs, width, group, num_groups;

    explicit LinearCall(const Call& c)
        : x(c.at<float>(0)), scales(c.at<float>(2)), bias(c.at<float>(3)), y(c.at<float>(4)),
          num_inputs(c.sizes[0]), num_outputs(c.sizes[1]), width(c.sizes[2]), group(c.sizes[3]),
          num_groups((width + group - 1) / group) {}

    // Scale of the group of column k in row j of W.
    float scale(int64_t j, int64_t k) const { return scales[j * num_groups + k / group]; }
};

// Call body(first row, number of rows) for tiles of nearly equal height: 8 rows in two of 4.
template <class Body>
INLINE void each_tile(int64_t rows, Body body) {
    const int64_t tiles = (rows + kInputs - 1) / kInputs;
    for (int64_t tile = 0, at = 0; tile < tiles; ++tile) {
        const int64_t count = (rows - at) / (tiles - tile);
        body(at, count);
        at += count;
    }
}

// Some columns of a tile of x and of kOutputs rows of W.  Both are in memory, with a distance of rows
// in elements, or copied as vectors behind each other: [columns / kLanes][rows][kLanes].
template <class W, bool is_copy>
struct Operands {
    const float* x;
    const W *w, *ahead;  // ahead: values of W that following calls read
    int64_t x_row, w_row, count;

    template <int kM>
    INLINE F input(int64_t a, int64_t k, int64_t n) const {
        return is_copy ? cached(x + k * kM + a * kLanes, kLanes) : cached(x + a * x_row + k, n);
    }
    INLINE F weight(int64_t b, int64_t k, int64_t n) const {
        if (is_copy) return cached((const float*)w + k * kOutputs + b * kLanes, kLanes);
        return cached(w + b * w_row + k, n);
    }
    // Prefetch kAhead rows; for copies one line of the cache, into L2.
    template <int kAhead>
    INLINE void prefetch(int64_t k) const {
        if (is_copy)
            __builtin_prefetch((const float*)ahead + k, 0, 2);
        else
            for (int b = 0; b < kAhead; ++b) __builtin_prefetch(ahead + b * w_row + k);
    }
};

// Add the products of kM rows of x with kN rows of W to `sums` [kM][kN], which start at 0 if
// is_first.  The columns are whole vectors or less than one vector.  Between calls the sums are in
// memory: the compiler would not keep them in registers anyway, and copy them several times.
template <int kM, int kN, int kAhead, class W, bool is_copy>
INLINE void multiply(const Operands<W, is_copy>& in, const float (&scales)[kN], bool is_first,
                     F* sums) {
    constexpr bool kHasScales = sizeof(W) == 1 && !is_copy;
    F total[kM][kN], scale[kN];
    for (int b = 0; b < kN; ++b) scale[b] = splat(scales[b]);
    if (is_first)
        for (int a = 0; a < kM; ++a)
            for (int b = 0; b < kN; ++b) total[a][b] = F{};
    else
        for (int a = 0; a < kM; ++a)
            for (int b = 0; b < kN; ++b) total[a][b] = sums[a * kN + b];
    const auto add = [&](int64_t k, int64_t n) __attribute__((always_inline)) {
        F in_w[kN];
        in.template prefetch<kAhead>(k);
        for (int b = 0; b < kN; ++b) {
            in_w[b] = in.weight(b, k, n);
            if (kHasScales) in_w[b] *= scale[b];
        }
        for (int a = 0; a < kM; ++a) {
            const F in_x = in.template input<kM>(a, k, n);
            for (int b = 0; b < kN; ++b) total[a][b] += in_x * in_w[b];
        }
    };
    if (in.count < kLanes)
        add(0, in.count);
    else
        for (int64_t k = 0; k < in.count; k += kLanes) add(k, kLanes);
    for (int a = 0; a < kM; ++a)
        for (int b = 0; b < kN; ++b) sums[a * kN + b] = total[a][b];
}

template <int kM, int kN, int kAhead, class W, bool is_copy>
INLINE void multiply_rows(int64_t rows, const Operands<W, is_copy>& in, const float (&scales)[kN],
                          bool is_first, F* sums) {
    if (rows == kM) return multiply<kM, kN, kAhead>(in, scales, is_first, sums);
    if constexpr (kM > 1)
        multiply_rows<kM - 1, kN, kAhead>(rows, in, scales, is_first, sums);
}

#if LANES == 16
// Return the sums of all lanes of 16 vectors, each in the order of `sum`.
INLINE F sums_of(const F* v) {
    F half[8], quarter[4], eighth[2];
    for (int i = 0; i < 8; ++i) {
        const __m512 a = (__m512)v[i], b = (__m512)v[i + 8];
        half[i] = (F)_mm512_shuffle_f32x4(a, b, 0x44) + (F)_mm512_shuffle_f32x4(a, b, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 a = (__m512)half[i], b = (__m512)half[i + 4];
        quarter[i] = (F)_mm512_shuffle_f32x4(a, b, 0x88) + (F)_mm512_shuffle_f32x4(a, b, 0xdd);
    }
    for (int i = 0; i < 2; ++i) {
        const __m512d a = (__m512d)quarter[i], b = (__m512d)quarter[i + 2];
        eighth[i] = (F)_mm512_unpacklo_pd(a, b) + (F)_mm512_unpackhi_pd(a, b);
    }
    const __m512 a = (__m512)eighth[0], b = (__m512)eighth[1];
    const F all = (F)_mm512_shuffle_ps(a, b, 0x88) + (F)_mm512_shuffle_ps(a, b, 0xdd);
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return (F)_mm512_permutexvar_ps(order, (__m512)all);
}
#endif

// Write kN outputs, from j on with a distance of `step`, of the rows [begin, end) from their `sums`
// [rows][kN], which have memory for whole groups of 4 rows.
template <int kN>
INLINE void finish(const LinearCall& c, const F* sums, int64_t begin, int64_t end, int64_t j,
                   int64_t step) {
    float bias[kN];
    for (int b = 0; b < kN; ++b) bias[b] = c.bias ? c.bias[j + b * step] : 0.0f;
#if LANES == 16
    if (kN == 4 && step == 1) {
        const __m128 four = _mm_loadu_ps(bias);
        for (int64_t i = begin; i < end; i += 4, sums += 16) {
            const __m512 all = (__m512)sums_of(sums);
            const __m128 rows[] = {
                _mm512_castps512_ps128(all), _mm512_extractf32x4_ps(all, 1),
                _mm512_extractf32x4_ps(all, 2), _mm512_extractf32x4_ps(all, 3)};
            for (int64_t a = 0; a < std::min<int64_t>(4, end - i); ++a)
                _mm_storeu_ps(c.y + (i + a) * c.num_outputs + j, _mm_add_ps(rows[a], four));
        }
        return;
    }
#endif
    for (int64_t i = begin; i < end; ++i)
        for (int b = 0; b < kN; ++b, ++sums)
            c.y[i * c.num_outputs + j + b * step] = sum(*sums) + bias[b];
}

// Compute kN outputs of all rows, from j on with a distance of `step`, from W in memory.  A single
// tile reads kN parts of W, each from its start to its end, which the hardware prefetches best.
// Several tiles read the same neighbouring rows, and prefetch kAhead of the next rows each.
template <int kN, int kAhead, class W>
INLINE void stream(const LinearCall& c, const W* weight, int64_t j, int64_t step) {
    constexpr bool kHasScales = sizeof(W) == 1;
    const bool is_single = c.num_inputs <= kInputs;
    F sums[(kInputs + 3) * kN];
    int64_t next = kN;
    each_tile(c.num_inputs, [&](int64_t i, int64_t rows) {
        for (int64_t k = 0; k < c.width;) {
            int64_t count = c.width - k;
            if (kHasScales) count = std::min(count, c.group - k % c.group);
            if (count > kLanes) count = count / kLanes * kLanes;
            float scales[kN];
            for (int b = 0; b < kN; ++b) scales[b] = kHasScales ? c.scale(j + b * step, k) : 1.0f;
            const W* w = weight + j * c.width + k;
            const W* ahead = w + (is_single ? kAheadBytes / (int64_t)sizeof(W) : next * c.width);
            const Operands<W, false> in{
                c.x + i * c.width + k, w, ahead, c.width, step * c.width, count};
            multiply_rows<kInputs, kN, kAhead>(rows, in, scales, k == 0, sums);
            k += count;
        }
        finish<kN>(c, sums, i, i + rows, j, step);
        next = kN + (next + kAhead) % kN;
    });
}

// Copy all rows of x by tiles: [tiles][width / kLanes][rows of the tile][kLanes].
INLINE void copy_inputs(const LinearCall& c, float* to) {
    each_tile(c.num_inputs, [&](int64_t i, int64_t rows) {
        each(c.width, [&](int64_t k, int64_t n) {
            for (int64_t a = 0; a < rows; ++a, to += kLanes)
                cache(to, cached(c.x + (i + a) * c.width + k, n), kLanes);
        });
    });
}

// Copy the rows [begin, end) of W by tiles: [tiles][width / kLanes][kOutputs][kLanes].
template <class W>
INLINE void copy_weight(const LinearCall& c, const W* weight, int64_t begin, int64_t end, float* to) {
    for (int64_t j = begin; j < end; j += kOutputs)
        each(c.width, [&](int64_t k, int64_t n) {
            for (int b = 0; b < kOutputs; ++b, to += kLanes) {
                const F values = cached(weight + (j + b) * c.width + k, n);
                cache(to, sizeof(W) == 1 ? values * c.scale(j + b, k) : values, kLanes);
            }
        });
}

constexpr int64_t kTileSums = (kInputs + 3) * kOutputs;  // vectors

// Compute the outputs [begin, end), a multiple of kOutputs, of all rows from copies of x and of these
// rows of W; meanwhile prefetch the next rows of W.  A tile of x stays in L1 for all rows of W.
template <class W>
INLINE void reuse(const LinearCall& c, const W* weight, const float* x, int64_t begin, int64_t end,
                  float* memory) {
    const int64_t width = (c.width + kLanes - 1) / kLanes * kLanes;
    F* sums = (F*)(memory + (end - begin) * width);
    copy_weight(c, weight, begin, end, memory);
    const char* ahead = (const char*)(weight + end * c.width);
    const char* last = ahead + (end - begin) * c.width * sizeof(W);
    const float no_scales[kOutputs] = {};
    each_tile(c.num_inputs, [&](int64_t i, int64_t rows) {
        for (int64_t k = 0; k < width; k += kDepth) {
            const int64_t count = std::min(kDepth, width - k);
            const float* w = memory + k * kOutputs;
            F* of_tile = sums;
            for (int64_t j = begin; j < end; j += kOutputs) {
                const Operands<W, true> in{x + i * width + k * rows, (const W*)w,
                                           (const W*)(ahead < last ? ahead : (const char*)w),
                                           0, 0, count};
                multiply_rows<kInputs, kOutputs, 1>(rows, in, no_scales, k == 0, of_tile);
                if (k + count == width) finish<kOutputs>(c, of_tile, i, i + rows, j, 1);
                w += kOutputs * width;
                of_tile += kTileSums;
                ahead += count * sizeof(float);
            }
        }
    });
}

// Return the first line of the cache in memory that has kLanes floats more than are needed.
INLINE float* aligned(std::vector<float>& memory, int64_t count) {
    constexpr uintptr_t kLine = 64;
    memory.resize(count + kLine / sizeof(float));
    return (float*)(((uintptr_t)memory.data() + kLine - 1) / kLine * kLine);
}

// Pointers: x (float) [m, k], W [n, k], scales of W in int8 (float) [n, groups], bias (float,
// optional) [n], y (float) [m, n].  Sizes: m, n, k, columns per group (k without scales, else a
// multiple of 16).  Units are rows of W.
template <class W>
void small_linear(const Call& call, int64_t begin, int64_t end) {
    const LinearCall c(call);
    const W* weight = call.at<W>(1);
    const int64_t whole = begin + (end - begin) / kOutputs * kOutputs;
    if (c.num_inputs > kStreamed) {
        thread_local std::vector<float> of_x, of_w;  // allocated once
        const int64_t width = (c.width + kLanes - 1) / kLanes * kLanes;
        float* x = aligned(of_x, c.num_inputs * width);
        copy_inputs(c, x);
        const int64_t in_cache = kCopyBytes / (4 * width) / kOutputs * kOutputs;
        const int64_t block = std::max<int64_t>(kOutputs, std::min(whole - begin, in_cache));
        float* memory = aligned(of_w, block * width + block / kOutputs * kTileSums * kLanes);
        for (int64_t j = begin; j < whole; j += block)
            reuse(c, weight, x, j, std::min(whole, j + block), memory);
    } else if (c.num_inputs > kInputs) {
        for (int64_t j = begin; j < whole; j += kOutputs) stream<kOutputs, 2>(c, weight, j, 1);
    } else {
        const int64_t step = (whole - begin) / kOutputs;
        for (int64_t j = begin; j < begin + step; ++j)
            if (c.num_inputs == 1 && sizeof(W) == 4)
                stream<kOutputs, 0>(c, weight, j, step);
            else
                stream<kOutputs, kOutputs>(c, weight, j, step);
    }
    for (int64_t j = whole; j < end; ++j) stream<1, 0>(c, weight, j, 1);
}
