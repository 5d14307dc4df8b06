"""One folder per operation: the Op with its reference, then a ladder of versions per language.

OPS holds them all by name. A new operation is a folder here and a line below; a new version is a kernel with its
launcher in a ladder and an entry in the Op's `versions`.
"""

from gpukern.kernels.attention import attention
from gpukern.kernels.copy import copy, saxpy
from gpukern.kernels.gelu import gelu
from gpukern.kernels.histogram import histogram
from gpukern.kernels.layernorm import layernorm, residual_layernorm
from gpukern.kernels.matmul import matmul
from gpukern.kernels.matvec import matvec
from gpukern.kernels.qkv import qkv
from gpukern.kernels.reduction import reduction
from gpukern.kernels.scores import scores
from gpukern.kernels.softmax import softmax
from gpukern.kernels.transpose import transpose
from gpukern.kernels.values import values
from gpukern.kernels.vector_add import vector_add

OPS = {
    op.name: op
    for op in (
        vector_add, copy, saxpy, transpose, reduction, histogram, gelu,
        matmul, matvec, layernorm, residual_layernorm, softmax, qkv, scores, values, attention,
    )
}  # fmt: skip
