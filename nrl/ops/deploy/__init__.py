"""The command ``nrl deploy``: files by which a program runs on a cluster that is there, under Slurm or Kubernetes.

`slurm` and `kubernetes` hold the settings of each and what follows from them; the texts are templates that lie beside
them. `checks` refuses what a text must not hold, `writing` fills a template in and writes the files.
"""
