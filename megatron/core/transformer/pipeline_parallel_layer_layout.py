"""Which layers each pipeline stage has, as a text (--pipeline-model-parallel-layout) or a list."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.core.config.errors import ConfigError
from megatron.core.config.parse import unquoted
from megatron.core.enums import LayerType
from megatron.core.parallel.default_groups import default_groups

LAYOUT = "--pipeline-model-parallel-layout"
# A backslash before a letter or bar is a shell escape that a script passed on.
_TOKENS = re.compile(r"\*(?P<times>\d{1,4})|\\*(?P<item>[EtmL|()])|[,\s]+|(?P<other>.)", re.DOTALL)
_LONGEST = 65536  # letters, to bound the memory of nested repetitions; real layouts are far shorter
_LETTERS = {
    "E": LayerType.embedding,
    "t": LayerType.decoder,
    "m": LayerType.mtp,
    "L": LayerType.loss,
}


def parse_layout(text: str) -> list[str]:
    """Return the contents of each virtual stage, such as ["Ett", "ttL"] for "Et*2|t*2L".

    E is the embedding, t a layer, m a multi-token prediction layer, L the loss; | ends a stage, *n
    repeats the letter or the parenthesised group before it.  Commas, blanks, quotes around the
    string and backslashes before its letters and bars are ignored.

    Raises ConfigError if the string cannot be parsed.
    """
    nested: list[list[str]] = [[]]
    for token in _TOKENS.finditer(unquoted(text)):
        item = token["item"]
        times = token["times"]
        if item == "(":
            nested.append([])
        elif item == ")" and len(nested) > 1:
            group = "".join(nested.pop())
            nested[-1].append(group)
        elif times and nested[-1]:
            if len(nested[-1][-1]) * int(times) > _LONGEST:
                raise ConfigError(f"{LAYOUT} {text}: more than {_LONGEST} letters")
            nested[-1][-1] *= int(times)
        elif item and item != ")":
            nested[-1].append(item)
        elif item or times or token["other"]:
            raise ConfigError(
                f"{LAYOUT} {text}: {token[0]!r} is wrong at this place: write the letters E t m L, "
                "a | between stages, and *n behind a letter or a group in ( )"
            )
    if len(nested) > 1:
        raise ConfigError(f"{LAYOUT} {text}: a ( without its )")
    return "".join(nested[0]).split("|")


class PipelineParallelLayerLayout(str):
    """Text of a layout, with Megatron Core's questions about it.

    ``layout`` is a text, or a list of layer types (or their names) for each stage, in the order of
    the layers.  "This rank" is the one of the groups in `parallel_state`, and ``vp_stage`` its
    model chunk, the first one if not given.
    """

    pipeline_model_parallel_size: int

    def __new__(
        cls, layout: str | Sequence[Sequence[LayerType | str]], pipeline_model_parallel_size: int
    ) -> PipelineParallelLayerLayout:
        """Raise ConfigError for a layer type that does not exist."""
        text = layout if isinstance(layout, str) else "|".join(map(_letters_of, layout))
        self = super().__new__(cls, text)
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        return self

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return str(self), self.pipeline_model_parallel_size

    @property
    def stages(self) -> list[list[LayerType]]:
        """Layer types of each virtual stage, in the order of the layers."""
        return self.parse_str_to_list(self)

    @property
    def virtual_pipeline_model_parallel_size(self) -> int:
        """Number of virtual stages per rank."""
        return len(self.stages) // self.pipeline_model_parallel_size

    @property
    def layout(self) -> list[list[list[LayerType]]]:
        """Layer types of each virtual stage of each pipeline rank."""
        ranks = self.pipeline_model_parallel_size
        return [self.stages[rank::ranks] for rank in range(ranks)]

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None
    ) -> int:
        """Return the number of layers before those of this rank's ``vp_stage``."""
        before = self.stages[: self._stage(vp_stage)]
        return sum(stage.count(layer_type) for stage in before)

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None
    ) -> int:
        """Return the number of layers of this rank's ``vp_stage``."""
        return len(self.get_layer_id_list(layer_type, vp_stage))

    def get_layer_id_list(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None
    ) -> list[int]:
        """Return the layer indices of this rank's ``vp_stage``."""
        offset = self.get_layer_offset(layer_type, vp_stage)
        count = self.stages[self._stage(vp_stage)].count(layer_type)
        return [*range(offset, offset + count)]

    def _stage(self, vp_stage: int | None) -> int:
        return (vp_stage or 0) * self.pipeline_model_parallel_size + default_groups().pp.rank()

    @staticmethod
    def from_str(layout: str, pipeline_model_parallel_size: int) -> PipelineParallelLayerLayout:
        """Return the layout of a text."""
        return PipelineParallelLayerLayout(layout, pipeline_model_parallel_size)

    @staticmethod
    def get_num_stages_from_str(layout: str) -> int:
        """Return the number of virtual stages of a text."""
        return len(parse_layout(layout))

    @staticmethod
    def parse_str_to_list(layout_str: str) -> list[list[LayerType]]:
        """Return the layer types of each virtual stage of a text.  Raises ConfigError."""
        return [[_LETTERS[letter] for letter in stage] for stage in parse_layout(layout_str)]


def _letters_of(stage: Sequence[LayerType | str]) -> str:
    letters = {layer.name: letter for letter, layer in _LETTERS.items()}
    names = [each.name if isinstance(each, LayerType) else each.strip().lower() for each in stage]
    if wrong := {*names} - letters.keys():
        raise ConfigError(f"{LAYOUT}: {', '.join(sorted(wrong))}: use {', '.join(letters)}")
    return "".join(letters[name] for name in names)
