// Softmax, cross-entropy and norms, one row at a time so that it stays in cache; sums in float.

// Maximum of the first `count` elements of a row; -inf if count is 0.
template <class T>
INLINE float row_max(const T* x, int64_t count) {
    F top = splat(-INFINITY), others[3] = {top, top, top};
    int64_t i = 0;
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {  // four maxima: one would serialize the loop
        top = larger(load(x + i, kLanes), top);
        for (int j = 0; j < 3; ++j)
            others[j] = larger(load(x + i + (j + 1) * kLanes, kLanes), others[j]);
    }
    each(count - i, [&](int64_t k, int64_t n) {
        top = larger(first(load(x + i + k, n), n, -INFINITY), top);
    });
    for (const F& other : others) top = larger(other, top);
    return largest(top);
}

// log(sum(exp(x))), without overflow.
template <class T>
INLINE float log_sum_exp(const T* x, int64_t count) {
    // Limit the maximum: in a row of -inf, -inf - (-inf) would be NaN.
    const float top = std::max(row_max(x, count), -FLT_MAX);
    return top + std::log(sum_over(count, [&](int64_t i, int64_t n) {
               return first(exp(load(x + i, n) - top), n, 0);
           }));
}

// Column of a target on this rank; -1 if another rank has it or there is no target.
INLINE int64_t column_of(int64_t target, const Call& c) {
    const int64_t column = target - c.sizes[2];
    return target >= 0 && column >= 0 && column < c.sizes[1] ? column : -1;
}

// Overwrite logits with (softmax - onehot) * scale; with zeros if the row has no target.  Padding
// columns become zero.
template <class T>
INLINE void turn_into_gradient(T* x, const Call& c, float log_sum, int64_t target, float scale) {
    const int64_t width = c.sizes[0], columns = target < 0 ? 0 : c.sizes[1];
    const int64_t column = column_of(target, c);
    const float at_target =
        column < 0 ? 0.0f : scale * (exp(splat(at(x, column)) - log_sum)[0] - 1.0f);
    each(columns, [&](int64_t i, int64_t n) {
        cache(x + i, exp(load(x + i, n) - log_sum) * scale, n);
    });
    if (column >= 0) store(x + column, splat(at_target), 1);
    std::memset(x + columns, 0, (width - columns) * sizeof(T));
}

// The next three kernels start with the pointers logits [rows, width] and targets (int64) [rows].
// Sizes: width, number of columns without padding, token id of the first column.

// Further pointers: log-sum-exp, logit of the target or 0 (float) [rows].
template <class T>
void own_sums(const Call& c, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* x = c.at<T>(0) + row * c.sizes[0];
        const int64_t column = column_of(c.at<int64_t>(1)[row], c);
        c.at<float>(2)[row] = log_sum_exp(x, c.sizes[1]);
        c.at<float>(3)[row] = column < 0 ? 0.0f : at(x, column);
    }
}

// Further pointers: log-sum-exp, factor (float, optional) [rows].  Numbers: factor if not per row.
template <class T>
void gradients_of_log_sums(const Call& c, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        turn_into_gradient(c.at<T>(0) + row * c.sizes[0], c, c.at<float>(2)[row],
                           c.at<int64_t>(1)[row],
                           c.pointers[3] ? c.at<float>(3)[row] : c.numbers[0]);
}

// Loss and gradient at once, if this rank holds the complete vocabulary.
// Further pointers: loss (float) [rows].  Numbers: factor of the gradient.
template <class T>
void cross_entropy(const Call& c, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        T* x = c.at<T>(0) + row * c.sizes[0];
        const int64_t target = c.at<int64_t>(1)[row];
        const float log_sum = target < 0 ? 0.0f : log_sum_exp(x, c.sizes[1]);
        c.at<float>(2)[row] = target < 0 ? 0.0f : log_sum - at(x, target);
        turn_into_gradient(x, c, log_sum, target, c.numbers[0]);
    }
}

// Pointers: scores (float) [.., queries, keys], overwritten with exponentials, probabilities
// [.., queries, keys].  Sizes: queries, keys, number of keys before the first query.
template <class T>
void causal_softmax(const Call& c, int64_t begin, int64_t end) {
    const int64_t queries = c.sizes[0], keys = c.sizes[1];
    for (int64_t row = begin; row < end; ++row) {
        float* x = c.at<float>(0) + row * keys;
        T* y = c.at<T>(1) + row * keys;
        const int64_t seen = c.sizes[2] + row % queries + 1;
        const float top = row_max(x, seen);
        const float total = sum_over(seen, [&](int64_t i, int64_t n) {
            const F e = first(exp(cached(x + i, n) - top), n, 0);
            cache(x + i, e, n);
            return e;
        });
        const float share = 1.0f / total;
        each(seen, [&](int64_t i, int64_t n) { store(y + i, cached(x + i, n) * share, n); });
        std::memset(y + seen, 0, (keys - seen) * sizeof(T));
    }
}

// Pointers: grad of probabilities [rows, keys], overwritten with grad of scores; probabilities.
// Sizes: as above.
template <class T>
void causal_softmax_backward(const Call& c, int64_t begin, int64_t end) {
    const int64_t queries = c.sizes[0], keys = c.sizes[1];
    for (int64_t row = begin; row < end; ++row) {
        T* grad = c.at<T>(0) + row * keys;
        const T* prob = c.at<T>(1) + row * keys;
        const int64_t seen = c.sizes[2] + row % queries + 1;
        const float mean = sum_over(
            seen, [&](int64_t i, int64_t n) { return load(grad + i, n) * load(prob + i, n); });
        each(seen, [&](int64_t i, int64_t n) {
            cache(grad + i, (cached(grad + i, n) - mean) * cached(prob + i, n), n);
        });
        std::memset(grad + seen, 0, (keys - seen) * sizeof(T));
    }
}

// Pointers: x, weight, bias (none for RMSNorm), y, mean (none for RMSNorm) and scale, that is
// 1 / deviation, (float) [rows].  Sizes: width.  Numbers: eps.
template <bool kIsRms, class T>
void norm_forward(const Call& c, int64_t begin, int64_t end) {
    const int64_t width = c.sizes[0];
    const T *weight = c.at<T>(1), *bias = c.at<T>(2);
    for (int64_t row = begin; row < end; ++row) {
        const T* x = c.at<T>(0) + row * width;
        T* y = c.at<T>(3) + row * width;
        float mean = 0;
        if (!kIsRms) {
            mean = sum_over(width, [&](int64_t i, int64_t n) { return load(x + i, n); }) / width;
            c.at<float>(4)[row] = mean;
        }
        const float squares = sum_over(width, [&](int64_t i, int64_t n) {
            const F away = first((kIsRms ? load(x + i, n) : cached(x + i, n)) - mean, n, 0);
            return away * away;
        });
        const float scale = 1.0f / std::sqrt(squares / width + c.numbers[0]);
        c.at<float>(5)[row] = scale;
        each(width, [&](int64_t i, int64_t n) {
            F out = (cached(x + i, n) - mean) * scale * cached(weight + i, n);
            if (!kIsRms) out += cached(bias + i, n);
            store(y + i, out, n);
        });
    }
}

// Pointers: x, weight, mean (none for RMSNorm), scale, grad of y, grad of x (optional), grad of
// weight and of bias (none for RMSNorm), summed per piece: float [pieces, width].
// Sizes: width, rows per piece.
template <bool kIsRms, class T>
void norm_backward(const Call& c, int64_t begin, int64_t end) {
    const int64_t width = c.sizes[0], piece = begin / c.sizes[1];
    const T* weight = c.at<T>(1);
    float *of_weight = c.at<float>(6) + piece * width, *of_bias = c.at<float>(7) + piece * width;
    std::memset(of_weight, 0, width * sizeof(float));
    if (!kIsRms) std::memset(of_bias, 0, width * sizeof(float));
    for (int64_t row = begin; row < end; ++row) {
        const T *x = c.at<T>(0) + row * width, *grad = c.at<T>(4) + row * width;
        const float mean = kIsRms ? 0.0f : c.at<float>(2)[row], scale = c.at<float>(3)[row];
        F along{}, total{};
        each(width, [&](int64_t i, int64_t n) {
            const F g = load(grad + i, n), normed = (load(x + i, n) - mean) * scale;
            const F through = g * cached(weight + i, n);
            along += through * normed;
            total += through;
            cache(of_weight + i, cached(of_weight + i, n) + g * normed, n);
            if (!kIsRms) cache(of_bias + i, cached(of_bias + i, n) + g, n);
        });
        if (!c.pointers[5]) continue;
        T* out = c.at<T>(5) + row * width;
        const float share = sum(along) / width, shift = kIsRms ? 0.0f : sum(total) / width;
        each(width, [&](int64_t i, int64_t n) {
            const F normed = (cached(x + i, n) - mean) * scale;
            const F through = cached(grad + i, n) * cached(weight + i, n);
            store(out + i, (through - shift - normed * share) * scale, n);
        });
    }
}

// Pointers: parts (float) [pieces, width], their sum [width], added in order.
// Sizes: width, pieces.
template <class T>
void sum_of_pieces(const Call& c, int64_t begin, int64_t end) {
    const int64_t width = c.sizes[0];
    each(end - begin, [&](int64_t i, int64_t n) {
        F total{};
        for (int64_t piece = 0; piece < c.sizes[1]; ++piece)
            total += load(c.at<float>(0) + piece * width + begin + i, n);
        store(c.at<T>(1) + begin + i, total, n);
    });
}

// Pointers: rows [m, width]; row indices of each token (int64) [tokens, visits], where m or more
// means none; sums of these rows [tokens, width].  Sizes: width, visits, m.
template <class T>
void sum_of_rows(const Call& c, int64_t begin, int64_t end) {
    const int64_t width = c.sizes[0], visits = c.sizes[1];
    for (int64_t token = begin; token < end; ++token) {
        const int64_t* rows = c.at<int64_t>(1) + token * visits;
        each(width, [&](int64_t i, int64_t n) {
            F total{};
            for (int64_t visit = 0; visit < visits; ++visit)
                if (rows[visit] < c.sizes[2])
                    total += load(c.at<T>(0) + rows[visit] * width + i, n);
            store(c.at<T>(2) + token * width + i, total, n);
        });
    }
}

// Pointers: x, sum of squares of each piece (double).
// Sizes: elements per piece, elements per block that is summed in float.
template <class T>
void sums_of_squares(const Call& c, int64_t begin, int64_t end) {
    const T* x = c.at<T>(0);
    double total = 0;
    for (int64_t at = begin; at < end; at += c.sizes[1])
        total += sum_over(std::min(end - at, c.sizes[1]), [&](int64_t i, int64_t n) {
            const F f = load(x + at + i, n);
            return f * f;
        });
    c.at<double>(1)[begin / c.sizes[0]] = total;
}
