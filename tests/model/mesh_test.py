"""What `train.mesh` may say, and of which devices, models and rows."""

import pytest

from rlx.base import UserError
from rlx.model import mesh
from rlx.model.model_config import ModelConfig

MODEL = ModelConfig(
    "Qwen2ForCausalLM", vocab_size=64, num_layers=1, model_dim=48, mlp_dim=96, num_heads=12,
    num_kv_heads=2, head_dim=4,
)  # fmt: skip


def test_a_mesh_has_every_axis_and_an_alias():
    axes = mesh.mesh_axes("data:4, tensor:2", 8)
    assert axes == {"replica": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2}
    assert tuple(axes) == mesh.AXES
    assert mesh.mesh_axes("", 8)["fsdp"] == 8
    assert mesh.num_row_shards(mesh.mesh_axes("replica:2,fsdp:3,context:5", 30)) == 6


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (lambda: mesh.parse_mesh("experts:8"), ["'experts'", "did you mean 'expert'"]),
        (lambda: mesh.check_model("expert:2", MODEL), ["expert:2", "0 experts", "use fsdp"]),
        (lambda: mesh.check_torch("expert:2", MODEL), ["cut experts", "in place of expert"]),
        (lambda: mesh.parse_mesh("fsdp:4,data:2"), ["mend 'data:2'"]),
        (lambda: mesh.parse_mesh("fsdp:0"), ["mend 'fsdp:0'"]),
        (lambda: mesh.parse_mesh("fsdp=8"), ["'fsdp=8'"]),
        (lambda: mesh.check_devices("fsdp:4", 1), ["4 places", "there are 1 device;", "equal"]),
        (lambda: mesh.check_devices("fsdp:2,context:2", 8), ["4 places", "8 devices"]),
        (
            lambda: mesh.check_model("tensor:8", MODEL),
            ["tensor:8", "12", "96", "1, 2, 3, 4, 6, 12"],
        ),
        (lambda: mesh.check_torch("context:2", MODEL), ["trainer=torch does not", "use fsdp"]),
        (lambda: mesh.check_torch("tensor:4", MODEL), ["tensor:4", "key heads", "trainer=jax"]),
        (lambda: mesh.check_rows("context:4", 300, (96, 100), 64), ["=64 on each of 4", "300"]),
        (lambda: mesh.check_rows("context:4", 100, (96, 100), 64), ["of 100", "multiples of 8"]),
        (lambda: mesh.check_rows("context:2", 130, (64,), 65), ["130", "_microbatch even"]),
        (lambda: mesh.check_rows("context:2", 64, (64,), 65), ["130", "_microbatch even"]),
        (lambda: mesh.check_rows("context:64", 64, (64,), 64), ["of 64", "multiples of 128"]),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_remedy(check, words):
    with pytest.raises(UserError) as error:
        check()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_what_fits_is_accepted():
    mesh.check_devices("", 5)
    mesh.check_devices("replica:2,tensor:3", 6)
    mesh.check_model("tensor:4", MODEL)  # though it does not divide the key heads
    mesh.check_rows("fsdp:8", 100, (100,), 100)
    mesh.check_rows("context:4", 256, (96, 128, 257), 64)
