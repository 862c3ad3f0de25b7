"""What launchers put into the environment of a rank, as recorded (srun, Open MPI, MPICH) or documented (jsrun, Cray).

All are rank 3 of 4 on two hosts with two ranks each, unless a comment says otherwise. What is not about ranks, hosts or
GPUs is left out.
"""

from __future__ import annotations

SLURM_JOB = {  # Slurm 22.05: sbatch -N2 -n4 --ntasks-per-node=2
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
BATCH_SCRIPT = {  # on the first host, not started by srun
    **SLURM_JOB,
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "CUDA_VISIBLE_DEVICES": "0,1",
}
SRUN = {  # --mpi=none, --gpus-per-task=1
    **SLURM_JOB,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2,3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "CUDA_VISIBLE_DEVICES": "1",
}
SRUN_PMI2 = {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "4711.1", "SLURM_MPI_TYPE": "pmi2"}
SRUN_PMIX = {**SRUN, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.4711.0", "SLURM_MPI_TYPE": "pmix"}
CRAY_SRUN = {  # --mpi=cray_shasta
    **SRUN,
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PMI_CONTROL_PORT": "63001",
    "SLURM_MPI_TYPE": "cray_shasta",
}
CRAY_PALS = {  # mpiexec of PALS, without Slurm
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}
_DAEMONS = {  # what the srun that starts mpiexec's daemons, one a node, leaves to their ranks
    **SLURM_JOB,
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_RANK": "3",
    "PMIX_HOSTNAME": "n2",
}
_HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_HOSTNAME": "n2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
OPEN_MPI = {**_OPEN_MPI}
OPEN_MPI_IN_SLURM = {**_DAEMONS, **_OPEN_MPI}
MPICH = {**_HYDRA}
MPICH_IN_SLURM = {**_DAEMONS, **_HYDRA, "SLURM_EXTERNAL_LAUNCHER": "1"}
LSF_JOB = {
    "LSB_JOBID": "815",
    "LSB_DJOB_HOSTFILE": "hostfile",
    "LSB_HOSTS": "",  # as in large jobs
    "CSM_ALLOCATION_ID": "99",
}
LSF_HOSTFILE = "batch3\na01n01.site.example\na01n01\na01n01\nb02n02\nb02n02.site.example\n"
"""the launch node first, each host once a slot, with and without its domain"""
JSRUN = {  # -n4 -r2 -a1 -g1, Spectrum MPI
    **LSF_JOB,
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "CUDA_VISIBLE_DEVICES": "0",
}
