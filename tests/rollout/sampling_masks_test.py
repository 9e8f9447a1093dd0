"""The masks of sampled tokens stay with them through pieces, turns and lost servers."""

import numpy as np

from rlx.fleet.requests import Chunk
from rlx.fleet.sample import Completion, PartialSample
from rlx.rollout import episode, workflows


def completion(tokens, masked):
    """Tokens t with the code [t] * (t % 3), or without masks."""
    tokens = np.array(tokens, np.int32)
    sizes = tokens % 3
    masks = {"kept_sizes": sizes, "kept": np.repeat(tokens, sizes).astype(np.uint8)}
    return Completion(
        tokens, -np.ones(len(tokens), np.float32), 0 * tokens, "stop", **(masks if masked else {})
    )


def codes(found):
    ends = np.cumsum(found.kept_sizes)
    return [part.tolist() for part in np.split(found.kept, ends[:-1])]


def test_turns_and_pieces():
    pieces = episode._one_piece(completion([4, 5], True), completion([8], True))
    assert codes(pieces) == [[4], [5, 5], [8, 8]]
    found = workflows.joined(
        [([1, 2], pieces), ([5, 5], completion([7, 8], False)), ([], completion([7, 6], True))],
        0.0, "0.0",
    )  # fmt: skip
    assert found.tokens.tolist() == [1, 2, 4, 5, 8, 5, 5, 7, 8, 7, 6]
    assert codes(found) == [[], [], [4], [5, 5], [8, 8], [], [], [], [], [7], []]
    plain = workflows.joined([([1, 2], completion([4], False))], 0.0, "0.0")
    assert plain.kept is plain.kept_sizes is None


def test_a_sample_goes_on_at_a_server_without_masks():
    sample = PartialSample(0)
    sample.add(Chunk(0, [4, 5], [-1.0] * 2, [0, 0], "abort", kept_sizes=[1, 2], kept=b"\4\5\5"))
    sample.add(Chunk(0, [7], [-1.0], [0]))
    sample.add(Chunk(0, [7], [-1.0], [0], "stop", kept_sizes=[1], kept=b"\7"))
    assert codes(sample.completion()) == [[4], [5, 5], [], [7]]
