"""Names: their grammar, the chain, the shard rule, descriptors; golden vectors for ever."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3store import keys
from l3store.backends.memory import MemoryBackend
from l3store.errors import ConfigError
from l3store.keys import FIRST_PAGE, Chain, Coordinate, Descriptor, PlaceDescriptor
from l3store.keys._framing import frame
from l3store.page import place_digest

DESCRIPTOR = Descriptor(
    model="Qwen/Qwen3-8B", dtype="bfloat16", page_size=64, pool="kv", pool_class="mha", layers=36,
    heads=8, dims=(128, 128), page_bytes=9437184, weights_revision="abc123",
)  # fmt: skip

# -- golden vectors: literals, never computed -----------------------------------------------------


def test_golden_namespace():
    assert DESCRIPTOR.namespace() == "qwen-qwen3-8b-d0301ae27182b0e30043"


def test_golden_page_hashes():
    chain = Chain.from_tokens([1, 2, 3, 4, 5], 2)
    assert [value.hex() for value in chain.hashes] == [
        "614935088cf958cc1a3d93aa056dda09f25346e446303b1f829f56a0b3d699be",
        "13f30977c2fff9c1148ba10683a0c8fe5cbf2192b28cf93d70361513397c3196",
    ]
    assert keys.seed().hex() == "113affa2f17012377c0852287fb624d410991715491b525a737e7f87a2c2baf7"
    assert (
        keys.seed(lora="l", salt="s").hex()
        == "364c9a93f184b7b1d7a86e68e19c282cfa7ee0f97cfa7dfe7c60cd66e4870f80"
    )


def test_golden_place_digest():
    assert place_digest("m-1/kv/T0of2").hex() == "a5c250f37e9ed519d39c1c78fe67952e"


def test_golden_object_name():
    assert keys.object_name("m-1/kv/T0of2", bytes(range(32))) == (
        "m-1/kv/T0of2/000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )


# -- descriptors ----------------------------------------------------------------------------------

OTHER = {
    "model": "Qwen/Qwen3-9B", "dtype": "fp8_e4m3", "page_size": 32, "pool": "swa",
    "pool_class": "mla", "layers": 35, "heads": 4, "dims": (128, 64), "page_bytes": 1,
    "byte_order": "token_major", "physical_page_size": 64, "interleave": 16, "stages": (18, 18),
    "weights_revision": "abc124", "draft_revision": "d", "quantization": "awq", "tag": "t",
    "schema": 2,
}  # fmt: skip


@pytest.mark.parametrize("field", Descriptor.__struct_fields__)
def test_each_field_changes_the_namespace(field):
    """A field without a value here fails: every new one must prove that it counts."""
    changed = msgspec.structs.replace(DESCRIPTOR, **{field: OTHER[field]})
    assert changed.digest() != DESCRIPTOR.digest()
    assert changed.namespace() != DESCRIPTOR.namespace()


@pytest.mark.parametrize("field", ["weights_revision", "draft_revision", "quantization", "tag"])
def test_none_and_empty_differ(field):
    none, empty = (msgspec.structs.replace(DESCRIPTOR, **{field: v}) for v in (None, ""))
    assert none.digest() != empty.digest()


def test_fields_are_framed_not_joined():
    one = msgspec.structs.replace(DESCRIPTOR, quantization="ab", tag="c")
    two = msgspec.structs.replace(DESCRIPTOR, quantization="a", tag="bc")
    assert one.digest() != two.digest()


_values = st.recursive(
    st.none() | st.text(max_size=4) | st.integers(), lambda inner: st.lists(inner, max_size=3)
)


@given(_values, _values)
def test_framing_is_injective(one, two):
    assert (frame(one) == frame(two)) == (one == two and type(one) is type(two))


@pytest.mark.parametrize(
    ("model", "slug"),
    [("Qwen/Qwen3-8B", "qwen-qwen3-8b"), ("../../etc", "etc"), ("", "model"), ("模型", "model"),
     ("A" * 200, "a" * 75)],
)  # fmt: skip
def test_the_slug_is_always_a_namespace(model, slug):
    name = msgspec.structs.replace(DESCRIPTOR, model=model).namespace()
    assert name.rpartition("-")[0] == slug
    assert keys.check_meta_name(name) == name


def test_uint8_is_refused_as_a_dtype():
    with pytest.raises(ConfigError, match="fp8_e4m3 and fp8_e5m2"):
        msgspec.structs.replace(DESCRIPTOR, dtype="uint8")


@pytest.mark.parametrize("field", ["page_size", "layers", "heads", "page_bytes"])
def test_counts_are_positive(field):
    with pytest.raises(ConfigError, match=field):
        msgspec.structs.replace(DESCRIPTOR, **{field: 0})


@pytest.fixture
def store():
    with MemoryBackend() as memory:
        yield memory


def test_attaching_stores_the_descriptor_once(store):
    name = keys.attach(store, DESCRIPTOR)
    assert keys.decode_meta(name, store.get_meta(name)) == DESCRIPTOR
    assert keys.attach(store, DESCRIPTOR) == name


def test_another_descriptor_under_the_name_is_refused_by_field(store):
    name = DESCRIPTOR.namespace()
    other = msgspec.structs.replace(DESCRIPTOR, layers=35)
    store.put_meta(name, msgspec.json.encode(other))
    with pytest.raises(ConfigError, match="layers = 35, this process says 36"):
        keys.attach(store, DESCRIPTOR)


def test_another_schema_is_refused_with_both_numbers(store):
    store.put_meta(DESCRIPTOR.namespace(), b'{"schema": 9, "whatever": 1}')
    with pytest.raises(ConfigError, match="schema 9; this version reads schema 1"):
        keys.attach(store, DESCRIPTOR)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"schema": 1, "modl": "x"}'])
def test_a_descriptor_that_cannot_be_read_is_named(store, data):
    with pytest.raises(ConfigError, match="cannot be read"):
        keys.decode_meta("m-1", data)


def test_a_read_only_store_is_not_written(store):
    store.capabilities = replace(store.capabilities, read_only=True)
    keys.attach(store, DESCRIPTOR)
    assert store.list_meta() == []


def test_place_descriptors_are_read_back():
    place = PlaceDescriptor(layer_start=0, layer_end=6, head_start=2, head_end=4, segments=(8, 8))
    assert keys.decode_meta("m/kv/all", msgspec.json.encode(place)) == place


def test_a_place_is_described_once_and_by_the_first(store):
    place = PlaceDescriptor(layer_start=0, layer_end=6, head_start=2, head_end=4, segments=(8, 8))
    keys.attach_place(store, "m/kv/all", place)
    keys.attach_place(store, "m/kv/all", msgspec.structs.replace(place, segments=(16,)))
    assert keys.decode_meta("m/kv/all", store.get_meta("m/kv/all")) == place


def test_a_place_of_a_read_only_store_is_not_described(store):
    store.capabilities = replace(store.capabilities, read_only=True)
    place = PlaceDescriptor(layer_start=0, layer_end=6, head_start=2, head_end=4, segments=(8, 8))
    keys.attach_place(store, "m/kv/all", place)
    assert store.list_meta() == []


# -- chains ---------------------------------------------------------------------------------------

_tokens = st.lists(st.integers(0, 2**64 - 1), max_size=40)


@given(_tokens, _tokens, st.integers(1, 5))
def test_a_chain_continued_late_equals_one_from_the_start(first, more, page_size):
    first = first[: len(first) // page_size * page_size]
    begun = Chain.from_tokens(first, page_size)
    if len(begun):
        assert begun.extended(more, page_size) == Chain.from_tokens(first + more, page_size)


@given(st.lists(st.integers(0, 9), min_size=4, max_size=12), st.data())
def test_equal_hashes_mean_equal_prefixes(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[at] += 100
    one, two = Chain.from_tokens(tokens, 2), Chain.from_tokens(changed, 2)
    for i, (a, b) in enumerate(zip(one.hashes, two.hashes, strict=True)):
        assert (a == b) == (i < at // 2)


def test_lora_and_salt_keep_prompts_apart():
    chains = {
        Chain.from_tokens([1, 2], 2, **kinds).hashes
        for kinds in ({}, {"lora": "x"}, {"salt": "x"}, {"lora": ""}, {"salt": ""},
                      {"lora": "x", "salt": "x"}, {"lora": "xx"})
    }  # fmt: skip
    assert len(chains) == 7


def test_page_boundaries_count():
    assert Chain.from_tokens([1, 2, 3, 4], 2).hashes != Chain.from_tokens([1, 2, 3, 4], 4).hashes
    assert keys.page_hash(bytes(32), [1]) != keys.page_hash(bytes(32), [1, 0])


@pytest.mark.parametrize("depth", [-1, 1 << 32, (1 << 32) - 1])
def test_a_depth_that_no_header_holds_is_refused(depth):
    with pytest.raises(ValueError, match="32 bits"):
        Chain((bytes(32),), depth=depth)


def test_slices_keep_parent_and_depth():
    chain = Chain.from_tokens(range(10), 2)
    assert list(chain[2:4]) == list(chain)[2:4]
    assert chain[2:][0] == (chain.hashes[2], chain.hashes[1], 2)
    assert chain[-1] == chain[4]
    assert chain[:2].keys("m/kv/all") == chain.keys("m/kv/all")[:2]
    assert chain[1:][1:] == chain[2:]
    with pytest.raises(ValueError, match="step 1"):
        chain[::2]


def test_an_engines_own_hashes():
    hexes = [hashlib.sha256(bytes([i])).hexdigest() for i in range(3)]
    unknown = Chain.from_hex(hexes)
    assert [link[1:] for link in unknown] == [
        (None, None), (bytes.fromhex(hexes[0]), None), (bytes.fromhex(hexes[1]), None),
    ]  # fmt: skip
    assert Chain.from_hex(hexes, parent="")[0] == (bytes.fromhex(hexes[0]), FIRST_PAGE, 0)
    assert Chain.from_hex(hexes[1:], parent=hexes[0], depth=1)[1][2] == 2
    with pytest.raises(ValueError, match="32 bytes"):
        Chain.from_hex(["00"])


def test_bad_tokens_and_sizes_are_refused():
    with pytest.raises(OverflowError):
        Chain.from_tokens([-1], 1)
    with pytest.raises(ValueError, match="page_size"):
        Chain.from_tokens([1], 0)
    with pytest.raises(ValueError, match="no hash"):
        Chain(()).extended([1], 1)


# -- grammar --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("../kv/all", "namespace"), (".a/kv/all", "namespace"), ("A/kv/all", "namespace"),
        ("/kv/all", "namespace"), ("a\0/kv/all", "namespace"), ("é/kv/all", "namespace"),
        ("a/KV/all", "pool"), ("a/k-v/all", "pool"), ("a//all", "pool"), ("a/kv/", "shard"),
        ("a/kv/.x", "shard"), ("a/kv/all\n", "shard"), ("a/kv", "not a place"),
        ("a/kv/all/x", "not a place"), ("a" * 97 + "/kv/all", "namespace"),
    ],
)  # fmt: skip
def test_a_bad_place_names_the_part(place, part):
    good = "a/kv/all/" + "0" * 64
    with pytest.raises(ValueError, match=part):
        keys.check_place(place)
    with pytest.raises(ValueError, match=part):
        keys.check_keys([good, f"{place}/{'0' * 64}", good])


@pytest.mark.parametrize(
    "digits",
    [
        "", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "  " + "0" * 62, "0" * 30 + "  " + "0" * 32,
        "0" * 30 + "\t\n" + "0" * 32, "0" * 63 + "\n", "0" * 64 + "\n", "0" * 63 + "\0",
        "0x" + "0" * 62, chr(0x660) * 64, chr(0xFF10) * 64,
    ],
)  # fmt: skip
def test_a_bad_hash_is_named(digits):
    good, bad = "a/kv/all/" + "0" * 64, f"a/kv/all/{digits}"
    for batch in ([bad], [good, bad, good]):
        with pytest.raises(ValueError, match="page hash") as told:
            keys.check_keys(batch)
        assert repr(bad) in str(told.value)


def test_a_slash_in_the_hash_makes_another_place():
    with pytest.raises(ValueError, match="not a place"):
        keys.check_keys([f"a/kv/all/{'0' * 31}/{'0' * 32}"])


def test_digits_never_move_between_keys():
    """Together 128 digits, but 63 and 65: each key is checked alone."""
    with pytest.raises(ValueError, match="page hash"):
        keys.check_keys(["a/kv/all/" + "0" * 63, "a/kv/all/" + "0" * 65])


def test_keys_are_split_into_place_and_hash():
    assert keys.split_key("a/kv/all/" + "0f" * 32) == ("a/kv/all", "0f" * 32)


@given(st.text(max_size=80))
def test_no_text_at_all_crashes_the_grammar(text):
    for check in (keys.check_place, keys.check_meta_name, keys.split_key):
        try:
            check(text)
        except ValueError:
            continue
        assert ".." not in text.split("/")
        assert not text.startswith("/")


# -- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "cut", "name"),
    [
        ({}, "tp", "all"),
        ({}, "replicated", "all"),
        ({"tp": 1, "tp_size": 4}, "tp", "T1of4"),
        ({"tp": 1, "tp_size": 4}, "replicated", "all"),
        ({"pp": 1, "pp_size": 2, "tp": 3, "tp_size": 4}, "tp", "P1of2-T3of4"),
        ({"pp": 1, "pp_size": 2, "cp": 0, "cp_size": 2}, "replicated", "P1of2-C0of2"),
        ({"tp": 3, "tp_size": 4, "dcp_size": 2}, "replicated", "D1of2"),
        ({"tp": 3, "tp_size": 4, "dcp_size": 2}, "tp", "T3of4-D1of2"),
    ],
)
def test_shard_names(at, cut, name):
    assert keys.shard_name(Coordinate(**at), cut) == name
    keys.check_place(f"m/kv/{name}")


@pytest.mark.parametrize(
    ("at", "cut", "writers"),
    [
        ({"tp_size": 4}, "tp", [0, 1, 2, 3]),
        ({"tp_size": 4}, "replicated", [0]),
        ({"tp_size": 4, "dcp_size": 2}, "replicated", [0, 1]),
        ({"tp_size": 4, "dcp_size": 2}, "tp", [0, 1, 2, 3]),
        ({"tp_size": 4, "cp": 1, "cp_size": 2, "pp": 1, "pp_size": 2}, "replicated", [0]),
    ],
)
def test_who_writes(at, cut, writers):
    ranks = [Coordinate(**at, tp=tp) for tp in range(at["tp_size"])]
    assert [rank.tp for rank in ranks if keys.is_writer(rank, cut)] == writers


@pytest.mark.parametrize(
    ("at", "match"),
    [({"tp": 4, "tp_size": 4}, "tp rank 4"), ({"pp": -1}, "pp rank -1"),
     ({"tp_size": 4, "dcp_size": 3}, "does not divide"), ({"dcp_size": 0}, "dcp_size 0")],
)  # fmt: skip
def test_impossible_coordinates_are_refused(at, match):
    with pytest.raises(ConfigError, match=match):
        Coordinate(**at)


def test_head_groups_need_a_multiple():
    with pytest.raises(ConfigError, match="head_groups 6"):
        keys.head_group_shards(Coordinate(tp_size=4), 6)
    with pytest.raises(ConfigError, match="decode context"):
        keys.head_group_shards(Coordinate(tp_size=4, dcp_size=2), 8)
    assert keys.head_group_shards(Coordinate(tp=1, tp_size=2), 4) == ["G2of4", "G3of4"]
