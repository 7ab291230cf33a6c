"""The fast engine of per-sample gradients: exact flat clipping at about the price of SGD.

How a step goes: `network` runs a private copy of the model and records what each layer saw;
`loss_gradients` starts the way back; one backward pass gives the gradient at each layer's output,
and no gradient of a weight. From the two, a layer's rule (`layers`, `convolution`) makes `pieces`:
per-sample gradients in the cheapest form (`cost`), which know their norms and their weighted sum.
`fast` puts it together; `linear` is the closed form of a single linear layer. A model that mixes
records (`probe`), uses a parameter outside of its layer or has a layer without a rule goes to the
reference, `FunctionalGradients`; `choice` decides who trains. A deployed client trains with
`isolated`, which keeps records from changing each other's rounding.

A new rule is a class with `run` in `layers` and a line in its table; the tests compare every rule
with one backward pass for each record.
"""

from noisewise.training.engine.choice import make_engine
from noisewise.training.engine.fast import FastGradients
from noisewise.training.engine.isolated import IsolatedGradients
from noisewise.training.engine.linear import LinearGradients

__all__ = ["FastGradients", "IsolatedGradients", "LinearGradients", "make_engine"]
