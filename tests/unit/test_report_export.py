"""Exports by parameter name, in both formats, and the digest of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import pytest

from shoal.errors import InputError
from shoal.record.checkpoint import CheckpointWriter, save
from shoal.report.export import digest, export

TENSORS = [["0.weight", [2, 3], 0, "weight"], ["0.bias", [3], 16, "bias"], ["1.mean", [], 32, "statistic"]]
META = json.dumps({"round": 3, "tensors": TENSORS}).encode()


def arrays(dtype=np.float32):
    return {"anchor": np.arange(48, dtype=dtype), "velocity": -np.arange(48, dtype=dtype)}


@pytest.fixture
def run(tmp_path):
    save(tmp_path / "checkpoint.h5", arrays(), META)
    return tmp_path


def expected(dtype=np.float32):
    return {
        "0.weight": np.arange(6, dtype=dtype).reshape(2, 3),
        "0.bias": np.array([16, 17, 18], dtype),
        "1.mean": np.array(32, dtype),
    }


def test_npz(run):
    with np.load(export(run, run / "model.npz")) as file:
        assert file.files == list(expected())
        for name, tensor in expected().items():
            assert file[name].dtype == tensor.dtype and np.array_equal(file[name], tensor)
            assert file[name].shape == tensor.shape
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint.h5", "model.npz"]


WHOLE = [["w", [2, 3], 0, "weight", "float32"], ["again", [2, 3], 0, "weight", "float32"]]
WHOLE += [["steps", [], 32, "statistic", "int64"], ["mask", [2], 40, "statistic", "bool"]]


@pytest.fixture
def whole(tmp_path):
    values = arrays()
    values["anchor"][[32, 40, 41]] = 31.6, 0.2, 0.9
    save(tmp_path / "checkpoint.h5", values, json.dumps({"tensors": WHOLE}).encode())
    return tmp_path


def test_tensors_with_two_names_and_of_whole_numbers(whole):
    with np.load(export(whole, whole / "model.npz")) as file:
        assert np.array_equal(file["w"], file["again"]) and file["w"].dtype == np.float32
        assert file["steps"] == 32 and file["steps"].dtype == np.int64 and file["steps"].shape == ()
        assert file["mask"].tolist() == [False, True] and file["mask"].dtype == bool
    content = export(whole, whole / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert [header[name]["dtype"] for name, *_ in WHOLE] == ["F32", "F32", "I64", "BOOL"]


def test_a_state_dict(whole):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; make test-torch runs this")
    state = torch.load(export(whole, whole / "model.pt"))
    assert list(state) == ["w", "again", "steps", "mask"]
    assert state["steps"].dtype == torch.int64 and state["steps"].item() == 32 and state["w"].shape == (2, 3)


def test_a_state_dict_without_pytorch(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"a \.pt needs PyTorch.*pip install"):
        export(whole, whole / "model.pt")
    assert not (whole / "model.pt").exists()


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "F32"), (np.float64, "F64"), (np.float16, "F16")])
def test_safetensors_read_by_the_format_s_definition(tmp_path, dtype, name):
    save(tmp_path / "checkpoint.h5", arrays(dtype), META)
    content = export(tmp_path, tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    assert length % 8 == 0 and content[8:9] == b"{"
    assert all(isinstance(value, str) for value in header.pop("__metadata__").values())
    end = 0
    for key, tensor in expected(dtype).items():
        entry = header.pop(key)
        start, stop = entry["data_offsets"]
        assert entry["dtype"] == name and entry["shape"] == list(tensor.shape) and start == end
        assert data[start:stop] == tensor.tobytes()
        end = stop
    assert not header and end == len(data)


def test_digest_by_hand(run):
    state = arrays()
    data = state["anchor"].astype("<f4").tobytes() + state["velocity"].astype("<f4").tobytes()
    assert digest(run) == hashlib.sha256(data).hexdigest()
    changed = arrays()
    changed["velocity"][47] = np.nextafter(changed["velocity"][47], 0, dtype=np.float32)
    before = digest(run)
    save(run / "checkpoint.h5", {**changed, "momentum": np.zeros(3)}, b"{}")
    assert digest(run) != before


def test_digest_is_of_the_newest_only_but_export_falls_back(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    for round in (1, 2):
        writer.write(arrays(), META, round)
    writer.wait()
    (tmp_path / "checkpoint.h5").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"checkpoint\.h5"):
        digest(tmp_path)
    with pytest.warns(UserWarning, match="checkpoint-1"):
        export(tmp_path, tmp_path / "model.npz")


def test_bad_requests(run, tmp_path):
    with pytest.raises(InputError, match=r"\.safetensors or \.pt"):
        export(run, run / "model.onnx")
    with pytest.raises(InputError, match="exists and is writable"):
        export(run, run / "none" / "model.npz")
    with pytest.raises(InputError, match="no checkpoint"):
        export(run / "none", run / "model.npz")
    for meta in (b"", b"{}", b'{"tensors": [["a", [99], 0, "weight"]]}', b'{"tensors": [1]}'):
        save(run / "checkpoint.h5", arrays(), meta)
        with pytest.raises(InputError, match="where its tensors lie"):
            export(run, run / "model.npz")
    save(run / "checkpoint.h5", {"other": np.zeros(3)}, META)
    with pytest.raises(InputError, match="holds no anchor"):
        digest(run)
