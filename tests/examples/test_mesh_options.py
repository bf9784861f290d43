"""The flags of train_gpt.py that split the model: what is refused, and what is settled."""

import example_programs
import pytest

mesh_options = example_programs.load("gpt.mesh_options")
options = example_programs.load("gpt.options")


def parsed(flags, num_devices=8):
    parser, args = options.parse(flags.split())
    mesh_options.check_mesh(parser, args, num_devices)
    return args


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--clip -1", ["--clip -1", "0 (no clipping)"]),
        ("--mesh data=2,tensor=2", ["has 4 devices", "there are 8", "--devices"]),
        ("--mesh data=2,pipe=4", ["'pipe=4'", "AXIS=N", "data, expert, context, tensor"]),
        ("--mesh data=2,data=4", ["'data=4'", "AXIS=N"]),
        ("--mesh data=0", ["'data=0'", "at least 1"]),
        ("--mesh data=4,expert=2", ["expert=2", "--experts 4"]),
        ("--experts 6 --mesh data=2,expert=4", ["--experts 6", "expert=4", "Try --experts 8"]),
        ("--experts 2 --top-k 4", ["--experts 2", "--top-k 4", "at least 4"]),
        ("--experts 4 --top-k 3 --width 8", ["--top-k 3", "--width 8"]),
        ("--zero 4", ["--zero", "4", "0, 1, 2, 3"]),
        ("--batch 8 --accumulate 3", ["--batch 8", "3 microbatches", "Try --batch 24"]),
        ("--attention ring", ["--attention ring", "context", "--mesh"]),
        ("--mesh data=2,context=4 --attention full", ["--attention full", "context=4", "ring"]),
        ("--mesh context=8 --seq 40", ["--seq 40", "16 parts", "Try --seq 48"]),
        ("--mesh context=8 --attention gathered --seq 36", ["--seq 36", "Try --seq 40"]),
        ("--mesh context=8 --attention ulysses", ["context=8", "has 4", "Try --heads 8"]),
        ("--mesh tensor=8", ["--heads 4", "tensor=8", "Try --heads 8"]),
        ("--sequence-parallel", ["--sequence-parallel", "tensor=N"]),
        (
            "--mesh data=2,tensor=4 --sequence-parallel --seq 30",
            ["--seq 30", "4 devices", "Try --seq 32"],
        ),
        ("--overlap --accumulate 2", ["--overlap", "--accumulate 2", "--zero 2"]),
        ("--overlap --zero 1", ["--overlap", "--zero 1", "--sequence-parallel"]),
        ("--collectives lax --zero 1", ["--collectives lax", "--zero 1", "jcoll"]),
        ("--collectives lax --mesh data=4,tensor=2", ["lax", "tensor=2", "data=N"]),
        ("--experts 4 --expert-mode padded", ["--expert-mode", "dropless", "capacity"]),
        ("--expert-mode capacity", ["--expert-mode capacity", "--experts N"]),
        ("--experts 4 --capacity-factor 2", ["--capacity-factor 2", "--expert-mode capacity"]),
        (
            "--experts 4 --expert-mode capacity --capacity-factor 0",
            ["--capacity-factor 0", "above 0"],
        ),
        ("--wire-dtype int8", ["--wire-dtype", "float32", "bfloat16"]),
    ],
)
def test_bad_flags(flags, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        parsed(flags)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("flags", "mesh", "attention"),
    [
        ("", {"data": 8}, "full"),
        ("--mesh tensor=4,data=2", {"data": 2, "tensor": 4}, "full"),
        ("--mesh context=4,data=2,tensor=1", {"data": 2, "context": 4}, "ring"),
        ("--mesh context=8,data=1 --attention gathered", {"data": 1, "context": 8}, "gathered"),
        ("--experts 4", {"data": 2, "expert": 4}, "full"),
        ("--experts 4 --mesh data=8", {"data": 8, "expert": 1}, "full"),
    ],
)
def test_mesh_is_settled(flags, mesh, attention):
    args = parsed(flags)
    assert list(args.mesh.items()) == list(mesh.items())
    assert args.attention == attention


def test_short_names_of_types():
    args = parsed("--dtype bf16 --wire-dtype f32")
    assert (args.dtype, args.wire_dtype) == ("bfloat16", "float32")
