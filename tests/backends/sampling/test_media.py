"""A sampler whose prompts have media: what it shares, what it refuses, and who answers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import nrl
from nrl import tiny
from nrl.backends import Media, Sampling, hf
from nrl.backends.engine import Decoded, Request
from nrl.backends.sampling.pool import EnginePool, StreamingEnginePool
from nrl.backends.sampling.prefix_router import Router
from nrl.backends.types import Chunks, length_of
from nrl.errors import GenerationError
from nrl.runtime import Slots


def picture(number: float, length: int = 4) -> Media:
    return Media("image", torch.full((2, 3), number), length)


class Sees:
    """Answers with the number of the first picture, and reads equal prompts once."""

    context_length, vocabulary = 32, 64

    def __init__(self) -> None:
        self.read: list[Chunks] = []

    def advance(self, requests: Sequence[Request], cancelled: Sequence[int]) -> list[tuple[int, Decoded]]:
        shared: dict[Any, int] = {}
        for request in requests:
            if tuple(request.prompt) not in shared:
                self.read.append(request.prompt)
                pictures = [part for part in request.prompt if isinstance(part, Media)]
                shared[tuple(request.prompt)] = int(pictures[0].data.flatten()[0]) if pictures else 0
        answers = [(request.number, torch.tensor([shared[tuple(request.prompt)]])) for request in requests]
        return [(number, Decoded(token, torch.zeros(1), truncated=False)) for number, token in answers]

    def begin(self) -> None: ...

    def add(self, bucket: Any) -> None: ...

    def end(self, version: int) -> None: ...


@pytest.fixture(params=[EnginePool, StreamingEnginePool])
def sampler(request: pytest.FixtureRequest, slots: Slots) -> Any:
    mesh = slots[:1].mesh(executable="system")
    return request.param("sees", [mesh], Sees, tiny.model(), Sampling(), media=frozenset({"image"}))


def engine_of(sampler: Any) -> Any:
    return sampler._replicas[0]._handles.values[0].value


def test_equal_tokens_with_other_pictures_are_other_prompts(sampler: EnginePool) -> None:
    prompts: list[Chunks] = [[5, picture(7), 6], [5, picture(9), 6], [5, picture(7), 6], [5, 6]]
    found = [row.token_ids.tolist() for row in sampler.generate(prompts).result()]
    assert found == [[7], [9], [7], [0]]
    assert len(engine_of(sampler).read) == 3
    assert sampler.capabilities.media == {"image"}
    assert sampler.capabilities.streams is isinstance(sampler, StreamingEnginePool)


def test_media_that_the_sampler_does_not_take(sampler: EnginePool, slots: Slots) -> None:
    sound: Chunks = [5, Media("audio", torch.zeros(3))]
    message = "generate: the prompt of row 1 has media of the kind 'audio', and the sampler takes image; see its capab"
    with pytest.raises(GenerationError, match=message):
        sampler.generate([[5], sound])
    with pytest.raises(GenerationError, match="of the kind 'audio', and the sampler takes tokens alone"):
        hf.sampler(slots[:1], tiny.model(), Sampling()).generate([sound])


def test_pictures_take_room_in_the_context(sampler: EnginePool) -> None:
    with pytest.raises(GenerationError, match="decode: the prompt of row 0 has 32 tokens, which leaves no room"):
        sampler.generate([[5, picture(1, 31)]])
    assert len(sampler.generate([[5, picture(1, 30)]]).result()) == 1
    assert sampler.generate([[picture(1)]]).result()[0].token_ids.tolist() == [1]
    with pytest.raises(GenerationError, match="row 0 has the token id 64, outside of the model's vocabulary"):
        sampler.generate([[picture(1), 64]])
    assert length_of([1, picture(1, 4), picture(2, 0)]) == 5


def test_an_engine_that_has_read_other_pictures_has_not_read_these() -> None:
    router = Router(2)
    one: Chunks = [5, picture(1), 6]
    other: Chunks = [5, picture(2), 6]
    assert router.choose([one], [0, 0]) == [0]
    assert router.choose([other], [1, 0]) == [1]
    assert router.choose([one, other], [1, 1]) == [0, 1]


@pytest.mark.parametrize(
    "other",
    [
        Media("image", torch.full((2, 3), 1.5)),
        Media("image", torch.full((3, 2), 1.0)),
        Media("image", torch.full((2, 3), 1.0, dtype=torch.float64)),
        Media("video", torch.full((2, 3), 1.0)),
        Media("image", torch.full((2, 3), 1.0), 2),
    ],
)
def test_media_are_equal_if_their_contents_are(other: Media) -> None:
    it = Media("image", torch.full((2, 3), 1.0))
    assert it != other
    assert it == Media("image", torch.full((3, 2), 1.0).T)
    assert len({it, other, Media("image", torch.ones(2, 3))}) == 2
    assert nrl.backends.Media is Media
