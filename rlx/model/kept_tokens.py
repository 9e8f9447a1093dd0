"""Sampling masks: the tokens that each token was drawn from, as codes of a few bytes. Numpy only.

A code is empty where the whole vocabulary was allowed. Otherwise its first byte names its form.
The shortest is used: ids of the kept tokens, ids of the others, or a bit for each token.

Shapes: N tokens, V vocabulary, W = ⌈V / 8⌉ bytes of bits, lowest bit first, M bytes of all codes.
"""

import numpy as np

OUTSIDE = -1e10  # logit of a token that was not kept; −inf would give NaN times 0
INPUTS = ("kept_ids", "kept_at", "kept_excluded")  # of the model, see `batch_arrays`
_KEPT, _EXCLUDED, _BITS = range(3)  # forms


def compress(bits: np.ndarray, vocab: int) -> tuple[bytes, list[int]]:
    """Return the codes of sets [N, ≥ W] uint8, end to end, and the bytes of each."""
    count, width = -(-vocab // 8), _id_bytes(vocab)
    full = np.zeros(-(-count // 8) * 8, np.uint8)  # read as 64-bit words, most of them 0
    full[:count] = np.packbits(np.ones(vocab, bool), bitorder="little")
    kept = np.zeros((len(bits), len(full)), np.uint8)
    kept[:, :count] = bits[:, :count]
    kept &= full
    codes = []
    for row, number in zip(kept, np.bitwise_count(kept.view(np.uint64)).sum(1), strict=True):
        form = _EXCLUDED if 2 * number > vocab else _KEPT
        if min(number, vocab - number) * width > count:
            codes.append(bytes([_BITS]) + row[:count].tobytes())
            continue
        words = (row ^ full if form == _EXCLUDED else row).view(np.uint64)
        places = np.flatnonzero(words)
        flags = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, 64)
        word, bit = np.nonzero(flags)
        ids = (places[word] * 64 + bit).astype("<u4").view(np.uint8).reshape(-1, 4)
        codes.append(b"" if number == vocab else bytes([form]) + ids[:, :width].tobytes())
    return b"".join(codes), [len(code) for code in codes]


def expand(
    kept: np.ndarray, kept_sizes: np.ndarray, vocab: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids that codes list; ValueError for codes of another vocabulary.

    Takes `kept`, codes [M] uint8, and `kept_sizes`, the bytes of each, [N] int. Returns ids [E]
    int; owners [E] int, the index in N of each, ascending; excluded [N] bool, whether a token's ids
    are the ones left out.
    """
    count, width, starts = -(-vocab // 8), _id_bytes(vocab), np.cumsum(kept_sizes) - kept_sizes
    forms = np.full(len(kept_sizes), _EXCLUDED, np.uint8)
    forms[kept_sizes > 0] = kept[starts[kept_sizes > 0]]
    some = np.flatnonzero((forms != _BITS) & (kept_sizes > 1))
    lengths, dense = kept_sizes[some] - 1, np.flatnonzero(forms == _BITS)
    if (kept_sizes[dense] != 1 + count).any() or (lengths % width).any():
        raise ValueError(f"sampling masks do not fit the vocabulary of {vocab}")
    wide = np.zeros((int(lengths.sum()) // width, 4), np.uint8)
    wide[:, :width] = kept[_spread(starts[some] + 1, lengths)].reshape(-1, width)
    ids, owners = [wide.view("<u4")[:, 0].astype(np.int64)], [np.repeat(some, lengths // width)]
    for row in dense:
        bits = kept[starts[row] + 1 : starts[row] + 1 + count]
        ids.append(np.flatnonzero(np.unpackbits(bits, count=vocab, bitorder="little")))
        owners.append(np.full(len(ids[-1]), row))
    order = np.argsort(np.concatenate(owners), kind="stable")
    listed = np.concatenate(ids)[order]
    if listed.max(initial=0) >= vocab:
        raise ValueError(f"sampling masks have token {listed.max()}, the vocabulary {vocab}")
    return listed, np.concatenate(owners)[order], forms == _EXCLUDED


def masks(kept: np.ndarray, kept_sizes: np.ndarray, vocab: int) -> np.ndarray:
    """Return whether each token of the vocabulary was kept, [N, V] bool."""
    ids, owners, excluded = expand(kept, kept_sizes, vocab)
    listed = np.zeros((len(kept_sizes), vocab), bool)
    listed[owners, ids] = True
    return listed ^ excluded[:, None]


def batch_arrays(
    kept: np.ndarray, kept_sizes: np.ndarray, index_BT: np.ndarray, vocab: int
) -> dict[str, np.ndarray]:
    """Return the inputs of the model for the sets of rows' tokens.

    Args:
      kept, kept_sizes: as of `expand`. index_BT: which of N each token is, N or more at padding.

    Returns:
      kept_ids, kept_at [B, E] int32: an id, and the place in the row of the token that lists it, 0
      at padding; kept_excluded [B, T] bool. E is T times a power of two, the least that holds all.
    """
    (rows, length), index = index_BT.shape, np.minimum(index_BT.ravel(), len(kept_sizes))
    size = np.append(kept_sizes, 0).astype(np.int64)
    codes = kept[_spread((np.cumsum(size) - size)[index], size[index])]
    ids, owners, excluded = expand(codes, size[index], vocab)
    row, counts = owners // length, np.bincount(owners // length, minlength=rows)
    # Depends on these rows only: a run that resumes has not seen the batches before them.
    wide = length << (-(-counts.max(initial=1) // length) - 1).item().bit_length()
    column = _spread(0 * counts, counts)
    listed, places = np.zeros((2, rows, wide), np.int32)
    listed[row, column], places[row, column] = ids, owners % length
    return dict(zip(INPUTS, (listed, places, excluded.reshape(rows, length)), strict=True))


def _id_bytes(vocab: int) -> int:
    return 1 + (vocab > 1 << 8) + (vocab > 1 << 16) + (vocab > 1 << 24)


def _spread(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return start, …, start + size − 1 of each pair, end to end."""
    return np.arange(int(sizes.sum())) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
