"""The kernels of `triton.scan`, which has the shapes and the formulas.

Matmuls take operands in the dtype of x (in float32 in three passes of tf32) and sum in float32.
A program takes ``L`` tokens, a chunk, and ``PER`` heads of a group one after the other: it reads B
and C once, and loads x and the state of a head while it computes with those of the head before.
A factor of a row is applied to the product, in float32: operands go from memory to tensor cores.
``BP`` and ``BN`` are the sizes of the tiles of a head and of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_masks(Sequence, chunk, L: tl.constexpr):
    """Return each token's sequence [L], and whether it is that before and that after the chunk."""
    token = chunk * L + tl.arange(0, L)
    if Sequence is None:
        own = token * 0
        before = own
        after = own
    else:
        own = tl.load(Sequence + token)
        before = tl.load(Sequence + tl.maximum(chunk * L - 1, 0))
        after = tl.load(Sequence + chunk * L + L - 1)
    return own, own == before, own == after


@triton.jit
def _load_steps(Steps, which, whole, L: tl.constexpr):
    """Return dt and a, in log2, of a chunk and head: 2 x [L].

    They are one load: of fewer values than threads, Triton loads one per value of a matrix.
    """
    side = tl.arange(0, 2).to(tl.int64)[None, :] * whole
    both = tl.load(Steps + which * L + tl.arange(0, L)[:, None] + side)
    dt, a = tl.split(both)
    return dt, a * _LOG2_E


@triton.jit
def _load_rows(M, start, tokens, stride, W, L: tl.constexpr, BW: tl.constexpr):
    """Return the rows of ``L`` tokens [L, BW] of ``W`` values; zeros beyond them.

    ``tokens`` is None if there are ``L`` at ``start``: comparisons take registers.
    """
    i = tl.arange(0, L)[:, None]
    place = tl.arange(0, BW)[None, :]
    inside = place < W
    if tokens is not None:
        inside &= i < (tokens - start).to(tl.int32)
    return tl.load(M + start * stride + (i * stride + place), mask=inside, other=0.0)


@triton.jit
def _store_rows(M, rows, start, tokens, stride, W, L: tl.constexpr, BW: tl.constexpr):
    i = tl.arange(0, L)[:, None]
    place = tl.arange(0, BW)[None, :]
    inside = place < W
    if tokens is not None:
        inside &= i < (tokens - start).to(tl.int32)
    to = M + start * stride + (i * stride + place)
    tl.store(to, rows.to(M.dtype.element_ty), mask=inside)


@triton.jit
def _load_state(States, number, P, N, BP: tl.constexpr, BN: tl.constexpr):
    """Return state number ``number`` [BP, BN]; zeros beyond it."""
    p = tl.arange(0, BP)[:, None]
    n = tl.arange(0, BN)[None, :]
    return tl.load(States + number * P * N + (p * N + n), mask=(p < P) & (n < N), other=0.0)


@triton.jit
def _where_seen(m, i, j, number_i, number_j):
    """Return ``m`` with 0 where token i is before token j, or in another sequence."""
    sees = (j <= i) & (number_j == number_i)
    return tl.where(sees, m, 0.0)


@triton.jit
def outer_products(
    X, Y, Steps, Sequence, Out, x_s, x_b, y_s, y_b, tokens, batch, heads, per_group, whole,
    LEFT: tl.constexpr, PER: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    chunk = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    first = tl.program_id(1) * PER
    number, goes_on, ends = _sequence_masks(Sequence, chunk, L)
    y = _load_rows(Y + b * y_b + first // per_group * N, chunk * L, tokens, y_s, N, L, BN)
    for head in tl.range(first, first + PER, num_stages=2):
        which = (chunk * batch + b) * heads + head
        dt, a = _load_steps(Steps, which, whole, L)
        if LEFT:
            a_end = tl.load(Steps + whole + which * L + L - 1) * _LOG2_E
            weight = tl.where(ends, tl.exp2(a_end - a) * dt, 0.0)
        else:
            weight = tl.where(goes_on, tl.exp2(a), 0.0)
        x = _load_rows(X + b * x_b + head * P, chunk * L, tokens, x_s, P, L, BP)
        x = (x.to(tl.float32) * weight[:, None]).to(y.dtype)  # round the product, not its factors
        out = tl.dot(tl.trans(x), y, input_precision="tf32x3")
        p = tl.arange(0, BP)[:, None]
        n = tl.arange(0, BN)[None, :]
        to = Out + which * P * N + (p * N + n)
        tl.store(to, out.to(Out.dtype.element_ty), mask=(p < P) & (n < N))


@triton.jit
def pass_states(
    Added, First, Last, A, Sequence, States, OfKeep, chunks, num_states, size,
    L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    own = which.to(tl.int64) * size + place
    state = tl.zeros((BLOCK,), tl.float32)
    if First is not None:
        state = tl.load(First + own, mask=inside, other=0.0)
    for step in tl.range(0, chunks, num_stages=4):
        chunk = tl.cast(step if States is None else chunks - 1 - step, tl.int64)
        number = chunk * num_states + which
        keep = tl.exp2(tl.load(A + number * L + L - 1) * _LOG2_E)
        if Sequence is not None:
            before = tl.load(Sequence + tl.maximum(chunk * L - 1, 0))
            keep = tl.where(tl.load(Sequence + chunk * L + L - 1) == before, keep, 0.0)
        at = number * size + place
        added = tl.load(Added + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(Added + at, state.to(Added.dtype.element_ty), mask=inside)
        if States is not None:
            before_it = tl.load(States + at, mask=inside, other=0.0).to(tl.float32)
            to = OfKeep + number * tl.num_programs(1) + tl.program_id(1)
            tl.store(to, tl.sum(state * before_it, 0))
        state = keep * state + added
    tl.store(Last + own, state, mask=inside)


@triton.jit
def outputs(
    X, Steps, B, C, D, States, Sequence, Y,
    x_s, x_b, b_s, b_b, tokens, batch, heads, per_group, whole,
    PER: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    chunk = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    first = tl.program_id(1) * PER
    of_group = b * b_b + first // per_group * N
    i = tl.arange(0, L)
    number, goes_on, ends = _sequence_masks(Sequence, chunk, L)
    rows_b = _load_rows(B + of_group, chunk * L, tokens, b_s, N, L, BN)
    rows_c = _load_rows(C + of_group, chunk * L, tokens, b_s, N, L, BN)
    products = tl.dot(rows_c, tl.trans(rows_b), input_precision="tf32x3")  # [i, j]
    products = _where_seen(products, i[:, None], i[None, :], number[:, None], number[None, :])
    for head in tl.range(first, first + PER, num_stages=2):
        which = (chunk * batch + b) * heads + head
        dt, a = _load_steps(Steps, which, whole, L)
        x = _load_rows(X + b * x_b + head * P, chunk * L, tokens, x_s, P, L, BP)
        state = _load_state(States, which, P, N, BP, BN)
        y = tl.dot(rows_c, tl.trans(state), input_precision="tf32x3")
        y *= tl.where(goes_on, tl.exp2(a), 0.0)[:, None]
        weights = tl.exp2(tl.minimum(a[:, None] - a[None, :], 0.0)) * dt[None, :] * products
        y = tl.dot(weights.to(x.dtype), x, y, input_precision="tf32x3")
        if D is not None:
            y += x.to(tl.float32) * tl.load(D + head).to(tl.float32)
        to = Y + (b * heads + head) * P
        _store_rows(to, y, chunk * L, tokens, batch * heads * P, P, L, BP)


@triton.jit
def _halves(a, L: tl.constexpr):
    """Return both halves of [L]: in a matrix of half the columns, fewer registers are live."""
    return tl.split(tl.trans(tl.reshape(a, (2, L // 2))))


@triton.jit
def _products(
    rows_b, C, chunk, tokens, c_s, N, number, start: tl.constexpr, L: tl.constexpr, BN: tl.constexpr
):
    """Return C_i B_j [j, i] for half of the tokens i, and 0 where i does not see j."""
    H: tl.constexpr = L // 2
    rows_c = _load_rows(C, chunk * L + start, tokens, c_s, N, H, BN)
    products = tl.dot(rows_b, tl.trans(rows_c), input_precision="tf32x3")
    return _where_half_seen(products, number, start, L)


@triton.jit
def _where_half_seen(m, number, start: tl.constexpr, L: tl.constexpr):
    """`_where_seen` of [j, i] for half of the tokens i."""
    i = start + tl.arange(0, L // 2)
    number_0, number_1 = _halves(number, L)
    number_i = number_1 if start else number_0
    return _where_seen(m, i[None, :], tl.arange(0, L)[:, None], number_i[None, :], number[:, None])


@triton.jit
def token_gradients(
    X, Grad, B, C, Steps, D, Leaving, Sequence, OfX, OfDt, OfD,
    x_s, x_b, b_s, b_b, tokens, batch, heads, per_group, whole,
    PER: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = L // 2
    chunk = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    first = tl.program_id(1) * PER
    of_group = b * b_b + first // per_group * N
    row = batch * heads * P
    number, goes_on, ends = _sequence_masks(Sequence, chunk, L)
    rows_b = _load_rows(B + of_group, chunk * L, tokens, b_s, N, L, BN)
    products_0 = _products(rows_b, C + of_group, chunk, tokens, b_s, N, number, 0, L, BN)
    products_1 = _products(rows_b, C + of_group, chunk, tokens, b_s, N, number, H, L, BN)
    for head in tl.range(first, first + PER, num_stages=2):
        which = (chunk * batch + b) * heads + head
        own = (b * heads + head) * P  # of contiguous rows of x
        dt, a = _load_steps(Steps, which, whole, L)
        a_end = tl.load(Steps + whole + which * L + L - 1) * _LOG2_E
        a_0, a_1 = _halves(a, L)
        grad = _load_rows(Grad + own, chunk * L, tokens, row, P, H, BP)
        weights = (tl.exp2(tl.minimum(a_0[None, :] - a[:, None], 0.0)) * products_0).to(grad.dtype)
        of_u = tl.dot(weights, grad, input_precision="tf32x3")  # u = dt x
        grad = _load_rows(Grad + own, chunk * L + H, tokens, row, P, H, BP)
        weights = (tl.exp2(tl.minimum(a_1[None, :] - a[:, None], 0.0)) * products_1).to(grad.dtype)
        of_u = tl.dot(weights, grad, of_u, input_precision="tf32x3")
        leaving = _load_state(Leaving, which, P, N, BP, BN)  # gradient of the state after
        through = tl.dot(rows_b, tl.trans(leaving), input_precision="tf32x3")
        of_u += through * tl.where(ends, tl.exp2(a_end - a), 0.0)[:, None]
        x = _load_rows(X + b * x_b + head * P, chunk * L, tokens, x_s, P, L, BP).to(tl.float32)
        at = which * L + tl.arange(0, L)
        tl.store(OfDt + at, tl.sum(of_u * x, 1))
        of_u *= dt[:, None]
        if D is not None:
            grad = _load_rows(Grad + own, chunk * L, tokens, row, P, L, BP).to(tl.float32)
            of_u += grad * tl.load(D + head).to(tl.float32)
            tl.store(OfD + at, tl.sum(grad * x, 1))
        _store_rows(OfX + own, of_u, chunk * L, tokens, row, P, L, BP)


@triton.jit
def _product_gradients(x, grad, a_j, a_i, dt, products, of_products):
    """Add a head's gradient of C_i B_j to ``of_products`` [j, i], also where i does not see j.

    Return it, and the gradients of a_i and -a_j from exp(a_i - a_j).
    """
    of_weights = tl.dot(x, tl.trans(grad), input_precision="tf32x3")
    of_weights *= tl.exp2(tl.minimum(a_i[None, :] - a_j[:, None], 0.0)) * dt[:, None]
    of_products += of_weights
    of_weights *= products
    return of_products, tl.sum(of_weights, 0), tl.sum(of_weights, 1)


@triton.jit
def product_gradients(
    X, Grad, B, C, Steps, Sequence, OfProducts, OfLogs,
    x_s, x_b, b_s, b_b, tokens, batch, heads, per_group, whole,
    PER: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = L // 2
    chunk = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    first = tl.program_id(1) * PER
    of_group = b * b_b + first // per_group * N
    row = batch * heads * P
    i = tl.arange(0, H)
    number, goes_on, ends = _sequence_masks(Sequence, chunk, L)
    rows_b = _load_rows(B + of_group, chunk * L, tokens, b_s, N, L, BN)
    products_0 = _products(rows_b, C + of_group, chunk, tokens, b_s, N, number, 0, L, BN)
    products_1 = _products(rows_b, C + of_group, chunk, tokens, b_s, N, number, H, L, BN)
    of_products_0 = tl.zeros((L, H), tl.float32)
    of_products_1 = tl.zeros((L, H), tl.float32)
    for head in tl.range(first, first + PER, num_stages=2):
        which = (chunk * batch + b) * heads + head
        dt, a = _load_steps(Steps, which, whole, L)
        x = _load_rows(X + b * x_b + head * P, chunk * L, tokens, x_s, P, L, BP)
        own = (b * heads + head) * P
        grad_0 = _load_rows(Grad + own, chunk * L, tokens, row, P, H, BP)
        grad_1 = _load_rows(Grad + own, chunk * L + H, tokens, row, P, H, BP)
        a_0, a_1 = _halves(a, L)
        to = OfLogs + which * L
        of_products_0, of_i, of_j = _product_gradients(
            x, grad_0, a, a_0, dt, products_0, of_products_0
        )
        tl.store(to + i, of_i)
        of_products_1, of_i, of_j_1 = _product_gradients(
            x, grad_1, a, a_1, dt, products_1, of_products_1
        )
        tl.store(to + H + i, of_i)
        tl.store(to + whole + tl.arange(0, L), of_j + of_j_1)
    to = OfProducts + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * L * L
    to += tl.arange(0, L)[:, None] * L + i[None, :]
    of_products_0 = _where_half_seen(of_products_0, number, 0, L)
    tl.store(to, of_products_0.to(OfProducts.dtype.element_ty))
    of_products_1 = _where_half_seen(of_products_1, number, H, L)
    tl.store(to + H, of_products_1.to(OfProducts.dtype.element_ty))


@triton.jit
def group_gradients(
    X, States, Own, Other, Steps, OfProducts, OfLogs, OfKeep, Sequence, Out, OfA,
    x_s, x_b, b_s, b_b, tokens, batch, heads, per_group, whole, groups, of_part,
    LEFT: tl.constexpr, PER: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    chunk = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    first = tl.program_id(1) * PER
    group = first // per_group
    of_group = b * b_b + group * N
    i = tl.arange(0, L)
    number, goes_on, ends = _sequence_masks(Sequence, chunk, L)
    other = _load_rows(Other + of_group, chunk * L, tokens, b_s, N, L, BN)
    at = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * L * L
    of_products = tl.load(OfProducts + at + i[:, None] * L + i[None, :])  # [j, i]
    of_products = of_products if LEFT else tl.trans(of_products)
    out = tl.dot(of_products, other, input_precision="tf32x3")
    own = _load_rows(Own + of_group, chunk * L, tokens, b_s, N, L, BN)
    for head in tl.range(first, first + PER, num_stages=2):
        which = (chunk * batch + b) * heads + head
        dt, a = _load_steps(Steps, which, whole, L)
        x = _load_rows(X + b * x_b + head * P, chunk * L, tokens, x_s, P, L, BP)
        state = _load_state(States, which, P, N, BP, BN)
        through = tl.dot(x, state, input_precision="tf32x3")
        to = OfA + which * L + i
        start = tl.where(goes_on, tl.exp2(a), 0.0)
        if LEFT:
            a_end = tl.load(Steps + whole + which * L + L - 1) * _LOG2_E
            through *= tl.where(ends, tl.exp2(a_end - a) * dt, 0.0)[:, None]
            made = tl.sum(through * own.to(tl.float32), 1)
            # The last is the sum: Triton 3.6 cannot compile a sum of sums of a GEMM for sm_100.
            of_end = tl.cumsum(made, 0) + start * tl.load(OfKeep + which)
            of_a = tl.load(OfLogs + which * L + i) - tl.load(OfLogs + whole + which * L + i)
            tl.store(to, of_a - made + tl.where(i == L - 1, of_end, 0.0))
        else:
            through *= start[:, None]
            of_a = tl.sum(through * own.to(tl.float32), 1)
            tl.store(to, tl.load(to) + of_a)
        out += through
    part = (tl.program_id(1) % (per_group // PER)).to(tl.int64)
    width = groups * N
    to = Out + part * of_part + b * width + group * N
    _store_rows(to, out, chunk * L, tokens, batch * width, N, L, BN)
