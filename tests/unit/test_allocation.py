"""Rank, hosts, GPU and the job's end from what launchers and schedulers say."""

from __future__ import annotations

from pathlib import Path

import environments as known
import pytest

from shoal.allocation import Allocation, check_joined, expand, hosts, read
from shoal.errors import InputError

N1_N2 = ("n1", "n2")


def _text_of(path: Path) -> str:
    assert str(path) == "hostfile"
    return known.LSF_HOSTFILE


PLACES = {
    "jsrun": (known.JSRUN, Allocation("jsrun", 3, 4, 1, 2, "LSF 815", ("a01n01", "b02n02"), ("0",))),
    "srun": (known.SRUN, Allocation("srun", 3, 4, 1, 2, "Slurm 4711", N1_N2, ("1",))),
    "srun pmi2": (known.SRUN_PMI2, Allocation("srun", 3, 4, 1, 2, "Slurm 4711", N1_N2, ("1",))),
    "srun pmix": (known.SRUN_PMIX, Allocation("srun", 3, 4, 1, 2, "Slurm 4711", N1_N2, ("1",))),
    "srun cray": (known.CRAY_SRUN, Allocation("srun", 3, 4, 1, 2, "Slurm 4711", N1_N2, ("1",))),
    "PALS": (known.CRAY_PALS, Allocation("PALS", 3, 4, 1, 2)),
    "Open MPI": (known.OPEN_MPI, Allocation("Open MPI's mpiexec", 3, 4, 1, 2)),
    "Open MPI in Slurm": (
        known.OPEN_MPI_IN_SLURM,
        Allocation("Open MPI's mpiexec", 3, 4, 1, 2, "Slurm 4711", N1_N2),
    ),
    "MPICH": (known.MPICH, Allocation("MPICH's mpiexec", 3, 4, 1, 2)),
    "MPICH in Slurm": (known.MPICH_IN_SLURM, Allocation("MPICH's mpiexec", 3, 4, 1, 2, "Slurm 4711", N1_N2)),
    "batch script": (known.BATCH_SCRIPT, Allocation(job="Slurm 4711", hosts=N1_N2, devices=("0", "1"))),
    "nothing": ({}, Allocation()),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_rank_knows_its_place(name: str) -> None:
    given, place = PLACES[name]
    assert read(given, _text_of) == place


@pytest.mark.parametrize(
    ("visible", "device"), [("1", 0), ("0,1", 1), ("0,1,2,3,4,5", 1), ("GPU-8932f937-d72c-4106", 0)]
)
def test_the_gpu_is_the_own_one_or_that_of_the_local_rank(visible: str, device: int) -> None:
    here = read({**known.SRUN, "CUDA_VISIBLE_DEVICES": visible})
    assert here.devices is not None
    assert here.device(len(here.devices)) == device


def test_local_ranks_share_gpus_where_there_are_fewer() -> None:
    assert Allocation(local_rank=5).device(4) == 1
    assert Allocation().device(4) == 0


def test_ranks_of_a_step_that_are_dealt_unevenly() -> None:
    given = {**known.SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}
    assert read(given).local_size == 1


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("login", ["login"]),
        ("n[1-2,07],login", ["n1", "n2", "n07", "login"]),
        ("nid[000009-000011]", ["nid000009", "nid000010", "nid000011"]),
        ("r[0-1]n[1-2]-ib.site", ["r0n1-ib.site", "r0n2-ib.site", "r1n1-ib.site", "r1n2-ib.site"]),
    ],
)
def test_node_lists_of_slurm(nodes: str, names: list[str]) -> None:
    assert list(expand(nodes)) == names


def test_hosts_of_lsf() -> None:
    small = {"LSB_JOBID": "1", "LSB_HOSTS": "h1 h1 h2.site h2"}
    assert hosts(small) == ("h1", "h2")
    assert hosts({**small, "LSB_HOSTS": "", "LSB_MCPU_HOSTS": "h1 20 h2 20"}) == ("h1", "h2")
    gone = {**small, "LSB_DJOB_HOSTFILE": "/nowhere/hostfile"}
    assert hosts(gone) == ("h1", "h2")
    without_csm = {key: value for key, value in known.LSF_JOB.items() if key != "CSM_ALLOCATION_ID"}
    assert hosts(without_csm, _text_of) == ("batch3", "a01n01", "b02n02")
    assert hosts({"SLURM_JOB_NODELIST": "10.0.0.[1-2],10.0.0.1"}) == ("10.0.0.1", "10.0.0.2")


def test_the_end_of_the_job() -> None:
    assert read({"SLURM_JOB_END_TIME": "1700000000"}).end_time_s == 1700000000.0
    assert read({"SLURM_JOB_END_TIME": "1700000000", "SHOAL_END_TIME": "1600000000"}).end_time_s == 1600000000.0
    assert read({"SHOAL_END_TIME": ""}).end_time_s is None
    with pytest.raises(InputError, match=r"SHOAL_END_TIME = 'noon' is no time"):
        read({"SHOAL_END_TIME": "noon"})


@pytest.mark.parametrize("name", [name for name in PLACES if name not in ("batch script", "nothing")])
def test_lone_ranks_are_refused(name: str) -> None:
    here = read(PLACES[name][0], _text_of)
    check_joined(here, 4, "MPICH")
    with pytest.raises(InputError, match=f"^{here.launcher} started 4 ranks, and each is alone in its MPI"):
        check_joined(here, 1, "MPICH")


def test_a_job_of_one_rank_is_none_of_several() -> None:
    for given in (known.BATCH_SCRIPT, {}, {**known.MPICH_IN_SLURM, "PMI_SIZE": "1", "PMI_RANK": "0"}):
        check_joined(read(given), 1, "MPICH")
