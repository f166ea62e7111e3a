"""Problems of the benchmark: random patterns, and patterns from files."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pathlib

import numpy as np
import pytest
import reference
import scipy.io
import scipy.sparse
from bench_problems import edge_case
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import choices, files, networks, selection
from benchmarks.__main__ import main
from benchmarks.problems import SUITES, Request, graph, uneven, uniform
from jaxsparse import Topology

QUICK = ["--seconds", "0.01", "--repeats", "2"]


def test_uniform_patterns():
    topology = uniform(300, 200, 0.9, seed=1)
    assert topology.shape == (300, 200) and abs(topology.sparsity - 0.9) < 0.01
    # So wide that rows are drawn in several blocks.
    large = uniform(9, 2**22, 0.999)
    assert large.shape == (9, 2**22) and abs(large.nnz / (9 * 2**22 * 0.001) - 1) < 0.05


@pytest.mark.parametrize("sparsity, variation", [(0.9, 0.0), (0.9, 0.5), (0.75, 1.5), (0.9, 2.0)])
def test_uneven_patterns(sparsity, variation):
    topology = uneven(2000, 512, sparsity, variation)
    lengths = np.diff(np.asarray(topology.row_offsets))
    assert lengths.std() / lengths.mean() == pytest.approx(variation, abs=0.02)
    assert topology.nnz == pytest.approx((1 - sparsity) * 2000 * 512, rel=0.01)
    topology.verify()
    assert abs(np.corrcoef(lengths, np.arange(2000))[0, 1]) < 0.1 or variation == 0  # not in order


@pytest.mark.parametrize("exponent, most", [(0.0, 45), (0.8, 900)])
def test_graphs(exponent, most):
    topology = graph(2000, 40_000, exponent)
    topology.verify()
    assert topology.nnz == 40_000
    for pattern in topology, topology.T:
        degrees = np.diff(np.asarray(pattern.row_offsets))
        assert most / 2 < degrees.max() < most


def test_rows_that_cannot_be_so_uneven():
    with pytest.raises(ValueError, match=r"uneven: .* can't vary by 2.0: at most by 1.56"):
        uneven(10, 10, 0.75, 2.0)


def test_operands_are_no_zeros_and_no_ones():
    problem = edge_case("padding")
    operands = problem.operands(3)
    assert operands["values"].shape == (problem.topology().nse,)
    for array in operands.values():
        assert array.dtype == np.float32 and not np.isin(array, (0, 1)).any()
        assert array.std() > 0.5
    assert not np.array_equal(operands["x"], problem.operands(4)["x"])


MATRIX = np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3]])
SMTX = "3, 3, 3\n0 1 1 3\n1 0 2\n"


def write_matrix(path):
    matrix = scipy.sparse.csr_array(MATRIX)
    if path.name.endswith(".smtx"):
        path.write_text(SMTX)
    elif path.name.endswith(".mtx"):
        scipy.io.mmwrite(path, matrix)
    elif path.name.endswith(".mtx.gz"):
        scipy.io.mmwrite(path.with_name("plain.mtx"), matrix)
        path.write_bytes(gzip.compress(path.with_name("plain.mtx").read_bytes()))
        path.with_name("plain.mtx").unlink()
    elif "bare" in path.name:
        np.savez(path, row_offsets=matrix.indptr, column_indices=matrix.indices, shape=(3, 3))
    else:
        scipy.sparse.save_npz(path, matrix.tocoo() if "coo" in path.name else matrix)


NAMES = ["a.smtx", "a.mtx", "a.mtx.gz", "csr.npz", "coo.npz", "bare.npz"]


@pytest.mark.parametrize("name", NAMES)
def test_readers(name, tmp_path):
    write_matrix(tmp_path / name)
    topology = files.read_topology(tmp_path / name)
    np.testing.assert_array_equal(reference.to_dense(np.ones(3), topology), MATRIX != 0)


def test_columns_are_sorted_and_duplicates_merged(tmp_path):
    (tmp_path / "a.smtx").write_text("1 4 4\n0 4\n3 1 1 0\n")
    topology = files.read_topology(tmp_path / "a.smtx")
    np.testing.assert_array_equal(topology.column_indices, [0, 1, 3])


@pytest.mark.parametrize(
    "text",
    ["", "3, 3, 3\n", "3, 3\n0\n1\n", "3, 3, 3\n0 1 1 3\n1 0\n", "3, 3, 3\n0 1 1 3\n1 0 9\n",
     "3, 3, 3\n0 2 1 3\n1 0 2\n", "3, 3, 3\n0 1 1 x\n1 0 2\n", "3, 3, 3\n0 1 1 3\n1 0 -1\n",
     "-1, 3, 0\n\n\n", "3, 3, 3\n0 1 1 2\n1 0 2\n", f"3, {2**40}, 3\n0 1 1 3\n1 0 2\n", "\xff"],
)  # fmt: skip
def test_malformed_smtx(text, tmp_path):
    path = tmp_path / "bad.smtx"
    path.write_text(text, "latin-1")
    with pytest.raises(ValueError, match=r"bad\.smtx: not a readable \.smtx matrix"):
        files.read_topology(path)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    cut=st.floats(0, 1),
    byte=st.integers(0, 255),
    end=st.booleans(),
)
def test_garbled_files_never_crash(tmp_path_factory, name, cut, byte, end):
    path = tmp_path_factory.mktemp("garbled") / name
    write_matrix(path)
    data = bytearray(path.read_bytes())
    at = int(cut * (len(data) - 1))
    data[at] = byte
    path.write_bytes(data[: at + 1] if end else data)
    try:
        topology = files.read_topology(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(topology, Topology)


def test_files_that_are_no_matrices(tmp_path):
    with pytest.raises(ValueError, match=r"a\.txt: must end in one of \.smtx"):
        files.read_topology(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"gone\.mtx: not a readable"):
        files.read_topology(tmp_path / "gone.mtx")
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    with pytest.raises(ValueError, match=r"other\.npz: not a readable \.npz"):
        files.read_topology(tmp_path / "other.npz")


def test_folder_of_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXSPARSE_DATA", str(tmp_path))
    command = ["run", "spmm", "--suite", "files", "--implementation", "jaxsparse", *QUICK]
    with pytest.raises(SystemExit):
        main(command)
    assert f"finds no file ending in .smtx, .mtx, .mtx.gz, .npz below {tmp_path}" in (
        capsys.readouterr().err
    )
    (tmp_path / "below").mkdir()
    write_matrix(tmp_path / "below" / "a.smtx")
    (tmp_path / "bad.smtx").write_text("1")
    assert main([*command, "--n", "2", "--output", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert {row["problem"] for row in result["results"]} == {"below/a.smtx_n2"}
    assert "not a readable" in result["skipped"]["bad.smtx_n2"]
    assert "bad.smtx" in capsys.readouterr().err
    monkeypatch.setenv("JAXSPARSE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(
        choices.UsageError, match=r"needs a folder in JAXSPARSE_DATA, got .*nowhere"
    ):
        selection.select(choices.Asked("spmm", suites=("files",)), "cpu")


# ---- layers of networks ----


def test_layers_at_their_batches():
    made = list(SUITES["networks"].problems(Request("spmm", "gpu")))
    by_name = {problem.name: problem for problem in made}
    assert len(by_name) == len(made) == (3 + 15) * 2 * 2
    groups = {problem.name.partition("/")[0] for problem in made}
    assert groups == {"transformer_b1", "transformer_b8", "rn50_b1", "rn50_b256"}
    for name, n in (
        ("transformer_b1/2048x512_n256_s0.9", 256),
        ("transformer_b8/512x2048_n2048_s0.7", 2048),
        ("rn50_b1/64x576_n3136_s0.9", 56 * 56),
        ("rn50_b1/2048x1024_n52_s0.9", 52),  # 49 pixels, padded
        ("rn50_b256/512x4608_n12544_s0.7", 256 * 49),
    ):
        assert by_name[name].n == n
    (small,) = {
        p.topology().shape for p in made if p.name.startswith("transformer_b1/512x512_n256_s0.9")
    }
    assert small == (512, 512)
    on_cpu = [p.name for p in SUITES["networks"].problems(Request("sddmm"))]
    assert {name.partition("/")[0] for name in on_cpu} == {"transformer_b1", "rn50_b1"}
    (asked,) = {p.n for p in SUITES["networks"].problems(Request("spmm", "gpu", n=(8,)))}
    assert asked == 8


@pytest.mark.parametrize(
    "path, expected",
    [
        ("dlmc/rn50/magnitude_pruning/0.8/bottleneck_2_block_group1_1_1.smtx", ("rn50", 56 * 56)),
        ("rn50/a/bottleneck_projection_block_group_projection_block_group4.smtx", ("rn50", 49)),
        ("rn50/a/initial_conv.smtx", ("rn50", 112 * 112)),
        ("rn50/a/final_dense.smtx", ("rn50", 1)),
        ("transformer/body_encoder_layer_0_ffn_conv1.smtx", ("transformer", 256)),
        ("other/rn50.smtx", None),
    ],
)
def test_layers_of_the_collection(path, expected):
    layer = networks.layer_of(pathlib.PurePath(path))
    if expected is None:
        assert layer is None
    else:
        network, below = layer
        assert (network.name, network.positions(path.rpartition("/")[2])) == expected
        assert path.endswith(f"{expected[0]}/{below}")


def test_suite_of_the_collection(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXSPARSE_DATA", str(tmp_path))
    write_matrix(tmp_path / "a.smtx")
    command = ["run", "spmm", "--suite", "dlmc", "--implementation", "jaxsparse", *QUICK]
    with pytest.raises(SystemExit):
        main(command)
    assert f"finds no matrix in a folder transformer or rn50 below {tmp_path}" in (
        capsys.readouterr().err
    )
    for folder in "transformer/l0", "dlmc/rn50/random/0.9":
        (tmp_path / folder).mkdir(parents=True)
        write_matrix(tmp_path / folder / "a_group3.smtx")
    made = list(SUITES["dlmc"].problems(Request("spmm", "gpu")))
    assert {(p.name, p.n) for p in made} == {
        ("transformer_b1/l0/a_group3.smtx_n256", 256),
        ("transformer_b8/l0/a_group3.smtx_n2048", 2048),
        ("rn50_b1/random/0.9/a_group3.smtx_n196", 196),
        ("rn50_b256/random/0.9/a_group3.smtx_n50176", 50176),
    }
    assert main([*command, "--n", "4", "--pass", "forward"]) == 0
    shown = capsys.readouterr().out
    assert "rn50/random/0.9/a_group3.smtx_n4" in shown and "transformer/l0/" in shown


@pytest.mark.skipif(
    not os.environ.get("JAXSPARSE_DATA"), reason="JAXSPARSE_DATA names no folder of matrices"
)
def test_real_files():
    paths = files.matrix_files(files.data_folder())
    by_suffix = {}
    for path in paths:
        by_suffix.setdefault(path.suffixes[-1], []).append(path)
    read = 0
    for path in itertools.chain.from_iterable(group[:3] for group in by_suffix.values()):
        try:
            topology = files.read_topology(path)
        except ValueError as error:
            assert str(path) in str(error)
            continue
        assert 0 < topology.nnz <= topology.shape[0] * topology.shape[1]
        read += 1
    assert read
