"""Transformers of diffusers that packing refuses, and pipelines that no recipe trains, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TILES = (
    "diffusers encodes with its VAE tile by tile only, in tiles of 24×320×320 pixels, and returns zeros for what does "
    "not fill a tile, so for every image and for most sizes of videos"
)
_BETWEEN_LEVELS = (
    "its model is distilled to predict the mean velocity between the noise level of a step and the next, and flow "
    "matching, which trains the velocity at one level, would leave the steps between levels as they are"
)
_FACE = (
    "its call takes embeddings of a face, which models outside the pipeline make, and a data set has no column for "
    "them"
)
_PRIOR_TOKENS = (
    "its transformer draws after one token for each patch, which the pipeline's vision-language model makes of an "
    "image, and the processor of that model resizes images, such as those below 512 pixels, so that they have another "
    "number of tokens than of patches"
)

UNPACKABLE: Mapping[str, str] = MappingProxyType(
    {
        "AllegroTransformer3DModel": f"no recipe trains it, since {_TILES}",
        "AnyFlowFARTransformer3DModel": (
            "it cuts a batch row into chunks of frames, the older ones in larger patches, and attends from chunk "
            "to chunk by a mask over the row"
        ),
        "AnyFlowTransformer3DModel": f"no recipe trains it, since {_BETWEEN_LEVELS}",
        "BriaFibo2Transformer2DModel": (
            "it squeezes texts into tokens, as many as the longest of them asks for, and puts all of these in front "
            "of each batch row; some of its blocks read further layers of the text"
        ),
        "BriaFiboTransformer2DModel": (
            "each of its blocks replaces half of the channels of a batch row's text by another layer of the text "
            "encoder"
        ),
        "ConsisIDTransformer3DModel": f"no recipe trains it, since {_FACE}",
        "GlmImageTransformer2DModel": f"no recipe trains it, since {_PRIOR_TOKENS}",
        "HeliosTransformer3DModel": (
            "it puts earlier frames, in patches of three sizes, in front of the tokens of a batch row, and as many of "
            "them in front of each row"
        ),
        "HiDreamImageTransformer2DModel": (
            "each of its blocks brings a text of its own, a layer of Llama, into the sequence of a batch row"
        ),
        "HunyuanVideoFramepackTransformer3DModel": (
            "it puts earlier frames, in patches of three sizes, in front of the tokens of a batch row"
        ),
        "JoyImageEditPlusTransformer3DModel": (
            "it makes positions inside its forward, by lists of the pictures in each batch row, and no module "
            "whose output could be replaced returns them"
        ),
        "JoyImageEditTransformer3DModel": (
            "it makes positions inside its forward, by the shape of a batch row, and no module whose output could "
            "be replaced returns them"
        ),
        "Kandinsky6SRTransformer3DModel": (
            "its attention is sparse: a batch row chooses, by the means of its blocks of 64 tokens, which blocks "
            "attend to which"
        ),
        "NucleusMoEImageTransformer2DModel": (
            "its experts choose the tokens that fit them best among those of a batch row, so that a token's "
            "output depends on the others in its row"
        ),
        "OmniGenTransformer2DModel": (
            "its words attend to the words before them alone, by a mask over a batch row in which pictures lie "
            "among the words"
        ),
        "SanaTransformer2DModel": (
            "its attention is linear, a sum over all keys of a batch row, and its feed-forward convolves over the "
            "grid of the row"
        ),
        "SanaVideoTransformer3DModel": (
            "its attention is linear, a sum over all keys of a batch row, and its feed-forward convolves over the "
            "grid and the frames of the row"
        ),
        "SanaWMLTX2RefinerTransformer3DModel": (
            "it refines a video block by block, and each attends to keys of earlier blocks, which its caller keeps in "
            "between in one tensor for all batch rows"
        ),
        "SanaWMTransformer3DModel": (
            "its attention is a recurrence over the frames of a batch row, and it convolves over their grid"
        ),
    }
)
"""Why packing refuses a transformer, by the name of its class in diffusers 0.42.1.

Its pipeline trains in buckets if a recipe claims it.
"""

_CHUNKS = (
    "it renders a video chunk by chunk, each beside those rendered before, and a run from single clips would train "
    "one chunk beside zeros, so that the weights that read rendered frames would get no gradient"
)

UNTRAINED: Mapping[str, str] = MappingProxyType(
    {
        "AllegroPipeline": _TILES,
        "AnyFlowFARPipeline": _BETWEEN_LEVELS,
        "AnyFlowPipeline": _BETWEEN_LEVELS,
        "ConsisIDPipeline": _FACE,
        "GlmImagePipeline": _PRIOR_TOKENS,
        "HeliosPipeline": _CHUNKS,
        "HeliosPyramidPipeline": _CHUNKS,
        "HunyuanVideoFramepackPipeline": _CHUNKS,
    }
)
"""Why no recipe trains the pipeline of such a transformer, by the name of its class in diffusers 0.42.1."""

OTHER_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "AceStepTransformer1DModel": "makes music",
        "DiTTransformer2DModel": "makes images of a class, and takes no text",
        "DreamLiteTransformer2DModel": "is a block of a U-Net, which normalizes over the pixels of a batch row",
        "MiniMaxMusic3Transformer1DModel": "makes music",
        "Transformer2DModel": "is a block of a U-Net, which normalizes over the pixels of a batch row",
        "TransformerTemporalModel": "is a block of a U-Net, which normalizes over the frames of a batch row",
    }
)
"""What the transformers of diffusers 0.42.1 do that do not make images or videos from text."""
