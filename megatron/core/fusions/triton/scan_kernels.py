"""The kernels of `triton.scan`, which has the shapes and the formulas.

Matmuls take operands in the dtype of x (in float32 in three passes of tf32) and sum in float32.
``BL``, ``BP`` and ``BN`` are the sizes of the tiles of a chunk's tokens, of a head and of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _number(Sequence, token):
    """Return the sequence of a token; 0 if there is one sequence."""
    return token * 0 if Sequence is None else tl.load(Sequence + token)


@triton.jit
def _before(Sequence, chunk, length):
    """Return the sequence that the state before a chunk belongs to."""
    return _number(Sequence, tl.maximum(chunk * length - 1, 0))


@triton.jit
def _load_steps(Steps, Sequence, chunk, b, head, chunks, length, batch, heads, BL: tl.constexpr):
    """Return dt, a, the decays from the state before a chunk and to the one after it: 4 x [BL]."""
    i = tl.arange(0, BL)
    inside = i < length
    token = chunk * length + i
    at = (token * batch + b) * heads + head
    dt = tl.load(Steps + at, mask=inside, other=0.0)
    of_a = Steps + chunks * length * batch * heads
    a = tl.load(of_a + at, mask=inside, other=0.0)
    end = chunk * length + length - 1
    a_end = tl.load(of_a + (end * batch + b) * heads + head)
    number = _number(Sequence, tl.minimum(token, end))
    start = tl.where(inside & (number == _before(Sequence, chunk, length)), tl.exp(a), 0.0)
    left = tl.where(inside & (number == _number(Sequence, end)), tl.exp(a_end - a), 0.0)
    return dt, a, start, left


@triton.jit
def _load_rows(M, chunk, length, tokens, width, stride, BL: tl.constexpr, BW: tl.constexpr):
    """Return the rows of a chunk's tokens [BL, BW]; zeros beyond them."""
    i = tl.arange(0, BL)
    place = tl.arange(0, BW)
    token = chunk * length + i
    inside = ((i < length) & (token < tokens))[:, None] & (place < width)[None, :]
    return tl.load(M + token[:, None] * stride + place[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(M, rows, chunk, length, tokens, width, stride, BL: tl.constexpr, BW: tl.constexpr):
    i = tl.arange(0, BL)
    place = tl.arange(0, BW)
    token = chunk * length + i
    inside = ((i < length) & (token < tokens))[:, None] & (place < width)[None, :]
    to = M + token[:, None] * stride + place[None, :]
    tl.store(to, rows.to(M.dtype.element_ty), mask=inside)


@triton.jit
def _load_state(States, at, P, N, BP: tl.constexpr, BN: tl.constexpr):
    """Return state number ``at`` [BP, BN]; zeros beyond it."""
    p = tl.arange(0, BP)[:, None]
    n = tl.arange(0, BN)[None, :]
    return tl.load(States + at * P * N + p * N + n, mask=(p < P) & (n < N), other=0.0)


@triton.jit
def _decays(Sequence, a, chunk, length, BL: tl.constexpr):
    """Return exp(a_i - a_j) for j <= i in the same sequence, else 0: [BL, BL]."""
    i = tl.arange(0, BL)
    number = _number(Sequence, chunk * length + tl.minimum(i, length - 1))
    sees = (i[:, None] >= i[None, :]) & (i < length)[:, None]
    sees = sees & (number[:, None] == number[None, :])
    return tl.where(sees, tl.exp(tl.where(sees, a[:, None] - a[None, :], 0.0)), 0.0)


@triton.jit
def outer_products(
    X,
    Y,
    Steps,
    Sequence,
    Out,
    x_s,
    x_b,
    y_s,
    y_b,
    tokens,
    chunks,
    length,
    batch,
    heads,
    per_group,
    P,
    N,
    LEFT: tl.constexpr,
    BL: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    chunk = (tl.program_id(0) // batch).to(tl.int64)
    b = tl.program_id(0) % batch
    head = tl.program_id(1)
    dt, a, start, left = _load_steps(
        Steps, Sequence, chunk, b, head, chunks, length, batch, heads, BL
    )
    weight = left * dt if LEFT else start
    x = _load_rows(X + b * x_b + head * P, chunk, length, tokens, P, x_s, BL, BP)
    group = head // per_group
    y = _load_rows(Y + b * y_b + group * N, chunk, length, tokens, N, y_s, BL, BN)
    x = (x.to(tl.float32) * weight[:, None]).to(y.dtype)  # round the product, not its factors
    out = tl.dot(tl.trans(x), y, input_precision="tf32x3")
    p = tl.arange(0, BP)[:, None]
    n = tl.arange(0, BN)[None, :]
    to = Out + ((chunk * batch + b) * heads + head) * P * N + p * N + n
    tl.store(to, out.to(Out.dtype.element_ty), mask=(p < P) & (n < N))


@triton.jit
def pass_states(
    Added,
    First,
    Last,
    Sums,
    Sequence,
    States,
    OfKeep,
    chunks,
    length,
    num_states,
    size,
    BLOCK: tl.constexpr,
):
    which = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    own = which.to(tl.int64) * size + place
    state = tl.zeros((BLOCK,), tl.float32)
    if First is not None:
        state = tl.load(First + own, mask=inside, other=0.0)
    for step in range(0, chunks):
        chunk = tl.cast(step if States is None else chunks - 1 - step, tl.int64)
        end = chunk * length + length - 1
        goes_on = _number(Sequence, end) == _before(Sequence, chunk, length)
        keep = tl.where(goes_on, tl.exp(tl.load(Sums + end * num_states + which)), 0.0)
        at = chunk * num_states * size + own
        added = tl.load(Added + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(Added + at, state.to(Added.dtype.element_ty), mask=inside)
        if States is not None:
            before = tl.load(States + at, mask=inside, other=0.0).to(tl.float32)
            to = OfKeep + (chunk * num_states + which) * tl.num_programs(1) + tl.program_id(1)
            tl.store(to, tl.sum(state * before, 0))
        state = keep * state + added
    tl.store(Last + own, state, mask=inside)


@triton.jit
def outputs(
    X,
    Steps,
    B,
    C,
    D,
    States,
    Sequence,
    Y,
    x_s,
    x_b,
    b_s,
    b_b,
    tokens,
    chunks,
    length,
    batch,
    heads,
    per_group,
    P,
    N,
    BL: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    chunk = (tl.program_id(0) // batch).to(tl.int64)
    b = tl.program_id(0) % batch
    head = tl.program_id(1)
    group = head // per_group
    dt, a, start, left = _load_steps(
        Steps, Sequence, chunk, b, head, chunks, length, batch, heads, BL
    )
    x = _load_rows(X + b * x_b + head * P, chunk, length, tokens, P, x_s, BL, BP)
    rows_b = _load_rows(B + b * b_b + group * N, chunk, length, tokens, N, b_s, BL, BN)
    rows_c = _load_rows(C + b * b_b + group * N, chunk, length, tokens, N, b_s, BL, BN)
    weights = tl.dot(rows_c, tl.trans(rows_b), input_precision="tf32x3")
    weights *= _decays(Sequence, a, chunk, length, BL)
    u = (x.to(tl.float32) * dt[:, None]).to(x.dtype)
    state = _load_state(States, (chunk * batch + b) * heads + head, P, N, BP, BN)
    y = tl.dot(rows_c, tl.trans(state), input_precision="tf32x3") * start[:, None]
    y += tl.dot(weights.to(x.dtype), u, input_precision="tf32x3")
    if D is not None:
        y += x.to(tl.float32) * tl.load(D + head).to(tl.float32)
    to = Y + (b * heads + head) * P
    _store_rows(to, y, chunk, length, tokens, P, batch * heads * P, BL, BP)


@triton.jit
def gradients(
    X, Steps, B, C, D, States, Leaving, OfKeep, Sequence, Grad, OfX, OfSteps, OfB, OfC, OfD,
    x_s, x_b, b_s, b_b, tokens, chunks, length, batch, heads, per_group, P, N,
    HEADS: tl.constexpr, BL: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    chunk = (tl.program_id(0) // batch).to(tl.int64)
    b = tl.program_id(0) % batch
    group = tl.program_id(1)
    part = tl.program_id(2)
    row = batch * heads * P
    i = tl.arange(0, BL)
    rows_b = _load_rows(B + b * b_b + group * N, chunk, length, tokens, N, b_s, BL, BN)
    rows_c = _load_rows(C + b * b_b + group * N, chunk, length, tokens, N, b_s, BL, BN)
    products = tl.dot(rows_c, tl.trans(rows_b), input_precision="tf32x3")  # [i, j]
    of_products = tl.zeros((BL, BL), tl.float32)
    of_b = tl.zeros((BL, BN), tl.float32)
    of_c = tl.zeros((BL, BN), tl.float32)
    for k in range(0, HEADS):
        head = group * per_group + part * HEADS + k
        number = (chunk * batch + b) * heads + head
        dt, a, start, left = _load_steps(
            Steps, Sequence, chunk, b, head, chunks, length, batch, heads, BL
        )
        x = _load_rows(X + b * x_b + head * P, chunk, length, tokens, P, x_s, BL, BP)
        own = (b * heads + head) * P  # of contiguous rows of x
        grad = _load_rows(Grad + own, chunk, length, tokens, P, row, BL, BP)
        wide = x.to(tl.float32)
        wide_grad = grad.to(tl.float32)
        u = (wide * dt[:, None]).to(x.dtype)
        decays = _decays(Sequence, a, chunk, length, BL)
        of_weights = decays * tl.dot(grad, tl.trans(u), input_precision="tf32x3")
        of_products += of_weights
        of_logs = of_weights * products

        # The state before the chunk, in y, and the gradient of the state after it.
        state = _load_state(States, number, P, N, BP, BN)
        from_state = (wide_grad * start[:, None]).to(x.dtype)
        through_c = tl.dot(from_state, state, input_precision="tf32x3")
        of_c += through_c
        leaving = _load_state(Leaving, number, P, N, BP, BN)
        to_state = (wide * (dt * left)[:, None]).to(x.dtype)
        through_b = tl.dot(to_state, leaving, input_precision="tf32x3")
        of_b += through_b

        weights = (products * decays).to(x.dtype)
        of_u = tl.dot(tl.trans(weights), grad, input_precision="tf32x3")
        of_u += tl.dot(rows_b, tl.trans(leaving), input_precision="tf32x3") * left[:, None]
        of_x = of_u * dt[:, None]
        if D is not None:
            of_x += wide_grad * tl.load(D + head).to(tl.float32)
            tl.store(OfD + number, tl.sum(tl.sum(wide_grad * wide, 1), 0))
        _store_rows(OfX + own, of_x, chunk, length, tokens, P, row, BL, BP)

        made = tl.sum(through_b * rows_b.to(tl.float32), 1)
        of_a = tl.sum(of_logs, 1) - tl.sum(of_logs, 0) - made
        of_a += tl.sum(through_c * rows_c.to(tl.float32), 1)
        keep = tl.sum(tl.where(i == length - 1, start, 0.0), 0)
        # The last is the sum: Triton 3.6 cannot compile a sum of sums of a GEMM for sm_100.
        of_end = tl.cumsum(made, 0) + keep * tl.load(OfKeep + number)
        of_a += tl.where(i == length - 1, of_end, 0.0)
        at = ((chunk * length + i) * batch + b) * heads + head
        tl.store(OfSteps + at, tl.sum(of_u * wide, 1), mask=i < length)
        tl.store(OfSteps + chunks * length * batch * heads + at, of_a, mask=i < length)
    of_products_in = of_products.to(rows_b.dtype)
    of_c += tl.dot(of_products_in, rows_b, input_precision="tf32x3")
    of_b += tl.dot(tl.trans(of_products_in), rows_c, input_precision="tf32x3")
    width = tl.num_programs(1) * N
    shift = part.to(tl.int64) * tokens * batch * width + b * width + group * N
    _store_rows(OfB + shift, of_b, chunk, length, tokens, N, batch * width, BL, BN)
    _store_rows(OfC + shift, of_c, chunk, length, tokens, N, batch * width, BL, BN)
