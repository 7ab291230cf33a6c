"""Public encoders for ``[features]``, and the download of their weights.

The functions here are ordinary ``"package.module:function"`` encoders: any torch module of yours
works in the same way.
"""

from noisewise.encoders.efficientnet import efficientnet_lite0
from noisewise.encoders.minilm import minilm
from noisewise.encoders.packages import ENCODERS, EncoderInfo, get_encoder

__all__ = ["ENCODERS", "EncoderInfo", "efficientnet_lite0", "get_encoder", "minilm"]
