// Attention of a step's rows to keys and values in pages, with an online softmax.
//
// A line is one head of one row.  The keys of a request are processed in blocks that start at
// multiples of kBlock, and within a block in their order.  So the bits of a line depend on its query
// and the keys it sees alone: not on the other lines of its tile, on chunks of a prompt or threads.
// Keys that a line does not see are excluded from its sums, because their values may be NaN.

constexpr int64_t kBlock = 64;                // keys
constexpr int kLines = 6;                     // lines in a tile of registers
constexpr int kWide = LANES == 16 ? 4 : 2;    // vectors of keys or values in it
constexpr int64_t kStep = kWide * kLanes;

INLINE F tanh(F x) {
    const F square = smaller(splat(0.0625f), x * x);  // the series is used below 1/4
    F p = poly(square, splat(-0.0539682540f), 0.133333333f);
    p = poly(square, p, -0.333333333f);
    const F near = x + x * (square * p), far = 1.0f - 2.0f * reciprocal(1.0f + exp(x * 2.0f));
    return x * x < 0.0625f ? near : far;
}

// Copy `count` <= kLanes rows of `width` elements to the columns of `out`, whose rows have kBlock.
template <class T>
INLINE void transpose(const T* const* rows, int64_t count, int64_t width, float* out) {
    int64_t j = 0;
#if LANES == 16
    for (; count == kLanes && j + kLanes <= width; j += kLanes) {
        __m512 a[16], b[16];
        for (int i = 0; i < 16; ++i) a[i] = (__m512)decoded(rows[i], j, kLanes, width);
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int k = 0; k < 2; ++k) {
                const __m512d low = (__m512d)b[i + k], high = (__m512d)b[i + k + 2];
                a[i + 2 * k] = (__m512)_mm512_unpacklo_pd(low, high);
                a[i + 2 * k + 1] = (__m512)_mm512_unpackhi_pd(low, high);
            }
        for (int i = 0; i < 4; ++i) {  // a[4 q + i]: rows 4 q to 4 q + 3, columns i, 4 + i, ..
            const __m512 low = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88);
            const __m512 high = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
            const __m512 low2 = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
            const __m512 high2 = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
            const auto put = [&](int64_t column, __m512 x) {
                _mm512_storeu_ps(out + (j + column) * kBlock, x);
            };
            put(i, _mm512_shuffle_f32x4(low, low2, 0x88));
            put(8 + i, _mm512_shuffle_f32x4(low, low2, 0xdd));
            put(4 + i, _mm512_shuffle_f32x4(high, high2, 0x88));
            put(12 + i, _mm512_shuffle_f32x4(high, high2, 0xdd));
        }
    }
#elif LANES == 8
    for (; count == kLanes && j + kLanes <= width; j += kLanes) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; ++i) a[i] = (__m256)decoded(rows[i], j, kLanes, width);
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int k = 0; k < 2; ++k) {
                a[i + 2 * k] = _mm256_shuffle_ps(b[i + k], b[i + k + 2], 0x44);
                a[i + 2 * k + 1] = _mm256_shuffle_ps(b[i + k], b[i + k + 2], 0xee);
            }
        for (int i = 0; i < 4; ++i) {  // a[4 q + i]: rows 4 q to 4 q + 3, columns i and 4 + i
            float* to = out + (j + i) * kBlock;
            _mm256_storeu_ps(to, _mm256_permute2f128_ps(a[i], a[4 + i], 0x20));
            _mm256_storeu_ps(to + 4 * kBlock, _mm256_permute2f128_ps(a[i], a[4 + i], 0x31));
        }
    }
#endif
    for (int64_t i = 0; i < count; ++i)
        for (int64_t k = j; k < width; ++k) out[k * kBlock + i] = decoded(rows[i], k, width);
}

// Heads and caches of a call; strides are in elements.
template <class T>
struct Pages {
    const T *keys, *values;
    const int32_t *first_row, *num_keys, *table;
    int64_t rows, segments, table_width, heads, groups, width, value_width, page_size;
    int64_t query_row, query_head, key_page, key_token, key_head, value_page, value_token;
    int64_t value_head, window, rows_per_unit, groups_per_unit;
    float scale, softcap;

    explicit Pages(const Call& c)
        : keys(c.at<T>(1)), values(c.at<T>(2)), first_row(c.at<int32_t>(3)),
          num_keys(c.at<int32_t>(4)), table(c.at<int32_t>(5)), scale(c.numbers[0]),
          softcap(c.numbers[1]) {
        int64_t* const fields[] = {&rows, &segments, &table_width, &heads, &groups, &width,
                                   &value_width, &page_size, &query_row, &query_head, &key_page,
                                   &key_token, &key_head, &value_page, &value_token, &value_head,
                                   &window, &rows_per_unit, &groups_per_unit};
        for (size_t i = 0; i < c.sizes.size(); ++i) *fields[i] = c.sizes[i];
    }
};

struct Line {
    const float* query;
    float* out;           // [value width]: sum of values, then the result
    int64_t first, stop;  // the keys that it sees
    int64_t head;
    float top;            // largest score so far
    float total[kLanes];  // sums of exponentials, by position modulo kLanes
};

// Working memory of a thread.
struct Block {
    int64_t start;  // of its first key, a multiple of kBlock
    const float* values[kBlock];
    float probs[kLines][kBlock];
    std::vector<float> by_column, wide_values;  // keys [width, kBlock], values [kBlock, value width]
    std::vector<Line> lines;
};

// Set probs to the dot products of kM queries with the first `count` keys of the block.
template <int kM>
INLINE void score(Block& block, const Line* lines, int64_t count, int64_t width) {
    for (int64_t at = 0; at < count; at += kStep) {
        F sums[kM][kWide] = {};
        for (int64_t j = 0; j < width; ++j) {
            F key[kWide];
            for (int w = 0; w < kWide; ++w)
                key[w] = cached(&block.by_column[j * kBlock + at + w * kLanes], kLanes);
            for (int i = 0; i < kM; ++i)
                for (int w = 0; w < kWide; ++w) sums[i][w] += lines[i].query[j] * key[w];
        }
        for (int i = 0; i < kM; ++i)
            for (int w = 0; w < kWide; ++w)
                cache(&block.probs[i][at + w * kLanes], sums[i][w], kLanes);
    }
}

// Turn the dot products of line i into exponentials, 0 for keys that it does not see; rescale its
// sums.  All tiles call the same copy of this function: in two copies the compiler may contract
// multiply-adds differently, and the bits of a line would depend on its tile.
template <class T>
__attribute__((noinline, noclone)) void to_probs(const Pages<T>& p, Block& block, int i, Line& line,
                                                 int64_t count) {
    const I first = I{} + (int32_t)(line.first - block.start);
    const I stop = I{} + (int32_t)(line.stop - block.start);
    I lane{};
    for (int k = 0; k < kLanes; ++k) lane[k] = k;
    F top = splat(line.top);
    for (int64_t at = 0; at < count; at += kLanes) {
        F x = cached(&block.probs[i][at], kLanes) * p.scale;
        if (p.softcap != 0.0f) x = p.softcap * tanh(x / p.softcap);
        const I key = lane + (int32_t)at;
        const F seen = (key >= first) & (key < stop) ? x : splat(-INFINITY);
        cache(&block.probs[i][at], seen, kLanes);
        top = larger(seen, top);
    }
    const float now = largest(top);
    F total = cached(line.total, kLanes);
    if (!(now == line.top)) {
        const float fading = exp(splat(line.top - now))[0];
        total *= fading;
        each(p.value_width, [&](int64_t j, int64_t n) {
            cache(line.out + j, cached(line.out + j, n) * fading, n);
        });
        line.top = now;
    }
    for (int64_t at = 0; at < count; at += kLanes) {
        const F prob = exp(cached(&block.probs[i][at], kLanes) - now);
        cache(&block.probs[i][at], prob, kLanes);
        total += prob;
    }
    cache(line.total, total, kLanes);
}

// Add the values of the block's keys [begin, end) to kM lines, which see all of them.
template <int kM>
INLINE void add_values(const Block& block, int i, const Line* lines, int64_t begin, int64_t end,
                       int64_t width) {
    const auto add = [&](int64_t j, auto wide, int64_t n) {
        constexpr int kVectors = decltype(wide)::value;
        F sums[kM][kVectors];
        for (int m = 0; m < kM; ++m)
            for (int w = 0; w < kVectors; ++w) sums[m][w] = cached(lines[m].out + j + w * kLanes, n);
        for (int64_t t = begin; t < end; ++t) {
            F value[kVectors];
            for (int w = 0; w < kVectors; ++w)
                value[w] = cached(block.values[t] + j + w * kLanes, n);
            for (int m = 0; m < kM; ++m)
                for (int w = 0; w < kVectors; ++w) sums[m][w] += block.probs[i + m][t] * value[w];
        }
        for (int m = 0; m < kM; ++m)
            for (int w = 0; w < kVectors; ++w) cache(lines[m].out + j + w * kLanes, sums[m][w], n);
    };
    int64_t j = 0;
    for (; j + kStep <= width; j += kStep) add(j, std::integral_constant<int, kWide>(), kLanes);
    each(width - j, [&](int64_t k, int64_t n) { add(j + k, std::integral_constant<int, 1>(), n); });
}

// Walks along the tokens of a request in one group of heads.
template <class T>
struct Walk {
    const Pages<T>& pages;
    const int32_t* page;
    int64_t at, group;

    INLINE Walk(const Pages<T>& p, const int32_t* table, int64_t group, int64_t token)
        : pages(p), page(table + token / p.page_size), at(token % p.page_size), group(group) {}
    INLINE const T* key() const {
        const auto& p = pages;
        return p.keys + *page * p.key_page + at * p.key_token + group * p.key_head;
    }
    INLINE const T* value() const {
        const auto& p = pages;
        return p.values + *page * p.value_page + at * p.value_token + group * p.value_head;
    }
    INLINE void step() {
        if (++at == pages.page_size) at = 0, ++page;
    }
};

template <class T>
INLINE void prefetch(const T* row, int64_t width) {
    for (int64_t j = 0; j < width; j += 64 / sizeof(T)) __builtin_prefetch(row + j);
    if (sizeof(T) == 1) __builtin_prefetch(row + width);  // the scale; these rows are not aligned
}

// Keys [begin, end) of a request in one group of heads.
struct Span {
    int64_t group, begin, end;
};

// Prefetches the keys and values of a span, a few at a time: the hardware does not know their pages,
// and it waits for memory if more lines are asked for at once than it can have in flight.
template <class T>
struct Ahead {
    Walk<T> token;
    int64_t left;  // tokens

    INLINE Ahead(const Pages<T>& p, const int32_t* table, Span next)
        : token(p, table, next.group, next.begin), left(next.end - next.begin) {}
    INLINE void prefetch_tokens(int64_t count) {
        for (; count > 0 && left > 0; --count, --left, token.step()) {
            prefetch(token.key(), token.pages.width);
            prefetch(token.value(), token.pages.value_width);
        }
    }
};

// Process one block of `count` keys for kM lines.
template <int kM, class T>
void attend_tile(const Pages<T>& p, Block& block, Line* lines, int64_t count, Ahead<T>& ahead) {
    score<kM>(block, lines, count, p.width);
    ahead.prefetch_tokens(kBlock / 4);
    int64_t begin[kM], end[kM], first = 0, stop = count;
    for (int i = 0; i < kM; ++i) {
        to_probs(p, block, i, lines[i], count);
        begin[i] = std::clamp<int64_t>(lines[i].first - block.start, 0, count);
        end[i] = std::clamp<int64_t>(lines[i].stop - block.start, 0, count);
        first = std::max(first, begin[i]);
        stop = std::min(stop, end[i]);
    }
    stop = std::max(first, stop);  // [first, stop) is what all lines see
    const auto alone = [&](int i, int64_t from, int64_t to) {
        if (from < to) add_values<1>(block, i, lines + i, from, to, p.value_width);
    };
    for (int i = 0; i < kM; ++i) alone(i, begin[i], std::min(end[i], first));
    add_values<kM>(block, 0, lines, first, stop, p.value_width);
    for (int i = 0; i < kM; ++i) alone(i, std::max(begin[i], stop), end[i]);
}

template <int kM, class T>
INLINE void attend_lines(const Pages<T>& p, Block& block, Line* lines, int64_t m, int64_t count,
                         Ahead<T>& ahead) {
    if (m == kM) return attend_tile<kM>(p, block, lines, count, ahead);
    if constexpr (kM > 1) attend_lines<kM - 1>(p, block, lines, m, count, ahead);
}

// Copy keys to the block's columns and find their values, in float.
template <class T>
INLINE void load_block(const Pages<T>& p, Block& block, const int32_t* table, Span now,
                       Ahead<T>& ahead) {
    const T* keys[kBlock];
    const int64_t from = now.begin - block.start, count = now.end - block.start;
    Walk<T> token(p, table, now.group, now.begin);
    for (int64_t t = from; t < count; ++t, token.step()) {
        keys[t] = token.key();
        if constexpr (sizeof(T) == sizeof(float)) {
            block.values[t] = token.value();
        } else {
            float* wide = &block.wide_values[t * p.value_width];
            each(p.value_width,
                 [&](int64_t j, int64_t n) {
                     cache(wide + j, decoded(token.value(), j, n, p.value_width), n);
                 });
            block.values[t] = wide;
        }
    }
    for (int64_t t = from; t < count;) {
        const int64_t n = std::min(count, (t / kLanes + 1) * kLanes) - t;
        ahead.prefetch_tokens(kBlock / 8);
        transpose(keys + t, n, p.width, &block.by_column[t]);
        t += n;
    }
}

// Make the lines of the rows [begin, end) of a segment, by group, row and head.
template <class T>
INLINE void start_lines(const Pages<T>& p, const Call& c, Block& block, int64_t segment, Span rows,
                        int64_t end_group) {
    const int64_t share = p.heads / p.groups;
    block.lines.clear();
    for (int64_t group = rows.group; group < end_group; ++group)
        for (int64_t row = rows.begin; row < rows.end; ++row)
            for (int64_t head = group * share; head < (group + 1) * share; ++head) {
                const int64_t stop = p.num_keys[segment] - (p.first_row[segment + 1] - row) + 1;
                const int64_t first = p.window < 0 ? 0 : std::max<int64_t>(0, stop - 1 - p.window);
                float* out = c.at<float>(7) + (row * p.heads + head) * p.value_width;
                std::memset(out, 0, p.value_width * sizeof(float));
                const float* query = c.at<float>(0) + row * p.query_row + head * p.query_head;
                block.lines.push_back({query, out, first, stop, head, -FLT_MAX, {}});
            }
}

// Divide the sum of values by the sum of exponentials, which has a term of the sink, if any.
INLINE void finish(const Line& line, const float* sink, int64_t value_width) {
    float fading = 1.0f, total = sum(cached(line.total, kLanes));
    if (sink) {
        const float score = sink[line.head], top = std::max(score, line.top);
        fading = exp(splat(line.top - top))[0];
        total = total * fading + exp(splat(score - top))[0];
    }
    const float factor = fading / total;
    each(value_width, [&](int64_t j, int64_t n) {
        cache(line.out + j, cached(line.out + j, n) * factor, n);
    });
}

// Attend the rows of a segment in the heads of the groups [rows.group, end_group).  The groups of a
// block follow each other, because their keys are neighbours in memory.
template <class T>
void attend_rows(const Pages<T>& p, const Call& c, Block& block, int64_t segment, Span rows,
                 int64_t end_group) {
    start_lines(p, c, block, segment, rows, end_group);
    const int64_t size = block.lines.size() / (end_group - rows.group);  // lines in a group
    const int64_t earliest = block.lines.front().first, last = block.lines.back().stop;
    const int32_t* table = p.table + segment * p.table_width;
    int64_t at = 0;
    for (block.start = earliest / kBlock * kBlock; block.start < last; block.start += kBlock) {
        const int64_t stop = std::min(last, block.start + kBlock);
        while (block.lines[at].stop <= block.start) ++at;  // these see no more keys
        for (int64_t group = rows.group; group < end_group; ++group) {
            const Span now{group, std::max(earliest, block.start), stop};
            const Span next = group + 1 < end_group
                                  ? Span{group + 1, now.begin, stop}
                                  : Span{rows.group, stop, std::min(last, stop + kBlock)};
            Ahead<T> ahead(p, table, next);
            load_block(p, block, table, now, ahead);
            Line* lines = &block.lines[(group - rows.group) * size];
            for (int64_t i = at; i < size && lines[i].first < stop; i += kLines)
                attend_lines<kLines>(p, block, lines + i, std::min<int64_t>(kLines, size - i),
                                     stop - block.start, ahead);
            ahead.prefetch_tokens(kBlock);
        }
    }
    for (const Line& line : block.lines) finish(line, c.at<float>(6), p.value_width);
}

// Pointers: key [rows, groups, width], keys [tokens, groups, width], value, values (alike), token of
// each row (int64) [rows].  Sizes: groups, then for keys and for values: width, strides of rows and
// heads, strides of tokens and heads of the cache.  A unit is a row.
template <class T>
void store_rows(const Call& c, int64_t begin, int64_t end) {
    for (int part = 0; part < 2; ++part) {
        const int64_t* sizes = &c.sizes[1 + 5 * part];
        for (int64_t i = begin; i < end; ++i)
            for (int64_t group = 0; group < c.sizes[0]; ++group)
                std::memcpy(c.at<T>(2 * part + 1) + c.at<int64_t>(4)[i] * sizes[3] + group * sizes[4],
                            c.at<T>(2 * part) + i * sizes[1] + group * sizes[2],
                            sizes[0] * sizeof(T));
    }
}

// Pointers: query (float), keys, values, first_row, num_keys, block_table (int32), sink (float,
// optional) [heads], out (float) [rows, heads, value width].  Sizes and numbers: fields of Pages, in
// order.  A unit is `rows_per_unit` rows of the step in `groups_per_unit` groups of heads.
template <class T>
void paged_attention(const Call& c, int64_t begin, int64_t end) {
    const Pages<T> p(c);
    Block block;
    block.by_column.resize(p.width * kBlock);
    if (sizeof(T) < sizeof(float)) block.wide_values.resize(p.value_width * kBlock);
    const int64_t chunks = (p.rows + p.rows_per_unit - 1) / p.rows_per_unit;
    const int32_t* ends = p.first_row + 1;
    for (int64_t unit = begin; unit < end; ++unit) {
        Span rows{unit / chunks * p.groups_per_unit, unit % chunks * p.rows_per_unit, 0};
        const int64_t end_group = std::min(p.groups, rows.group + p.groups_per_unit);
        const int64_t stop = std::min(p.rows, rows.begin + p.rows_per_unit);
        int64_t segment = std::upper_bound(ends, ends + p.segments, rows.begin) - ends;
        for (; rows.begin < stop && segment < p.segments; ++segment) {
            rows.end = std::min<int64_t>(stop, ends[segment]);
            if (rows.begin < rows.end) attend_rows(p, c, block, segment, rows, end_group);
            rows.begin = rows.end;
        }
    }
}
