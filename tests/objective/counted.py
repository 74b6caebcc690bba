"""What an expression costs, without a clock: the operations of torch that it runs, and the numbers that they make."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):
    """Operations inside this block, those of backward included."""

    operations = elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.operations += 1
        self.elements += sum(each.numel() for each in tree_leaves(made) if isinstance(each, Tensor))
        return made
