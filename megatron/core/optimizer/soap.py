"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner, for matrices.

A matrix W [m, n] with gradient G has averages L of G G^T and R of G^T G, and their eigenvectors Q_L
and Q_R.  The second moment is of Q_L^T G Q_R; the update is that of Adam there, rotated back:
Q_L ((Q_L^T M Q_R) / (sqrt(V) + eps)) Q_R^T, with the first moment M of G.  The first step computes
the eigenvectors and changes no matrix.  Every --soap-precondition-frequency steps one power
iteration and a QR decomposition follow the averages.

The owner of a matrix (`MatrixRule`) has its state, which no other data-parallel rank holds: 2 m^2 +
2 n^2 + 2 m n values in fp32.  Tensor-parallel ranks gather the gradient and compute the same.
A side that is longer than `_MAX_SIDE` is not rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.optimizer.muon import Matrix, MatrixRule, complete_shapes, map_matrices
from megatron.core.optimizer.update_rules import State

_MAX_SIDE = 10000  # as the authors' code: the factors of a longer side take too long


class Soap(MatrixRule):
    """SOAP for matrices."""

    def matrix_state(self, param: nn.Parameter) -> State:
        """Return the state of each matrix in ``param``; nothing where another rank owns it."""
        matrix = self.owned.get(param)
        if matrix is None:
            return {}
        state: State = {}
        count = self.tp_group(matrix).size() if matrix.info.shard_dim is not None else 1
        for number, shape in enumerate(complete_shapes(matrix.shape, matrix.info, count)):
            sizes = {"soap_mean": shape, "soap_square": shape}
            for side, size in zip("lr", shape, strict=True):
                if size <= _MAX_SIDE:
                    sizes |= {
                        f"soap_factor_{side}": (size, size),
                        f"soap_basis_{side}": (size, size),
                    }
            for kind, each in sizes.items():
                state[f"{kind}.{number}"] = torch.zeros(each, device=param.device)
        return state

    def contribution(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        return grad

    def direction(self, matrix: Matrix, share: Tensor) -> Tensor:
        assert matrix.param is not None, "the owner of a matrix holds a part of it"
        state = self.state_of(matrix.param.main)

        def compute(number: int, grad: Tensor, _: object) -> Tensor:
            mine = {
                key.partition(".")[0]: kept
                for key, kept in state.items()
                if isinstance(kept, Tensor) and key.endswith(f".{number}")
            }
            return self._update_matrix(grad, mine)

        return map_matrices(share, matrix.info, self.tp_group(matrix), compute)

    def _update_matrix(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Update the state of a matrix by ``grad``; return what its learning rate multiplies."""
        config = self.config
        done = int(self.steps_done) - 1  # updates of the matrix, this one included
        mean = state["soap_mean"]
        square = state["soap_square"]
        factors = [(state.get(f"soap_factor_{s}"), state.get(f"soap_basis_{s}")) for s in "lr"]
        update = torch.zeros_like(grad)
        if done:
            bases = [basis for _, basis in factors]
            mean.lerp_(grad, 1.0 - config.adam_beta1)
            square.lerp_(_rotated(grad, bases).square(), 1.0 - config.adam_beta2)
            scaled = _rotated(mean, bases) / (square.sqrt() + config.adam_eps)
            update = _rotated(scaled, [None if b is None else b.T for b in bases])
            update *= (1 - config.adam_beta2**done) ** 0.5 / (1 - config.adam_beta1**done)
        for dim, (factor, basis) in enumerate(factors):
            if factor is None or basis is None:
                continue
            outer = grad @ grad.T if dim == 0 else grad.T @ grad
            factor.lerp_(outer, 1.0 - config.soap_shampoo_beta)
            if not done:
                basis.copy_(torch.linalg.eigh(factor).eigenvectors.flip(1))
            elif done % config.soap_precondition_frequency == 0:
                product = factor @ basis
                order = (basis * product).sum(0).argsort(descending=True)
                square.copy_(square.index_select(dim, order))
                basis.copy_(torch.linalg.qr(product.index_select(1, order)).Q)
        return update


def _rotated(matrix: Tensor, bases: list[Tensor | None]) -> Tensor:
    """Return left^T matrix right; None is the identity."""
    left, right = bases
    matrix = matrix if left is None else left.T @ matrix
    return matrix if right is None else matrix @ right
