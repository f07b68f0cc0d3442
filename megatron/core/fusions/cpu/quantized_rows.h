// Rows of int8 codes, each followed by its float scale: the format of keys and values of 8 bits.
//
// Value = code * scale.

INLINE float scale_of(const int8_t* row, int64_t width) {
    float scale;
    std::memcpy(&scale, row + width, sizeof scale);
    return scale;
}

// Element j, or elements [j, j + n), of a row of `width` elements, in float.
template <class T>
INLINE float decoded(const T* row, int64_t j, int64_t) {
    return at(row, j);
}
INLINE float decoded(const int8_t* row, int64_t j, int64_t width) {
    return (float)row[j] * scale_of(row, width);
}
template <class T>
INLINE F decoded(const T* row, int64_t j, int64_t n, int64_t) {
    return cached(row + j, n);
}
INLINE F decoded(const int8_t* row, int64_t j, int64_t n, int64_t width) {
    return cached(row + j, n) * scale_of(row, width);
}

// Pointers: rows [N, g, width], cache (int8) [tokens, g, row bytes], place of each row in the cache
// (int64) [N].  Sizes: g, width, strides of rows [N, g] and of the cache [tokens, g].  A unit is a
// row of one head.  Rows with NaN or infinity get the scale NaN.
template <class T>
void quantize_rows(const Call& c, int64_t begin, int64_t end) {
    const int64_t groups = c.sizes[0], width = c.sizes[1];
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t i = unit / groups, group = unit % groups;
        const T* row = c.at<T>(0) + i * c.sizes[2] + group * c.sizes[3];
        int8_t* out = c.at<int8_t>(1) + c.at<int64_t>(2)[i] * c.sizes[4] + group * c.sizes[5];
        F top{}, zero{};
        each(width, [&](int64_t j, int64_t n) {
            const F x = cached(row + j, n);
            top = larger(larger(x, -x), top);
            zero += x * 0.0f;  // NaN for NaN and infinity
        });
        const float limit = largest(top);
        const float scale = limit > 0.0f ? limit / 127.0f + sum(zero) : 1.0f + sum(zero);
        each(width, [&](int64_t j, int64_t n) {
            const F shifted = cached(row + j, n) / scale + kMagic;
            const I code = (I)shifted - (I)splat(kMagic);
            write(out + j, __builtin_convertvector(code, B), n);
        });
        std::memcpy(out + width, &scale, sizeof scale);
    }
}
