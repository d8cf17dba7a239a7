"""The checks of ``nrl doctor``: does this machine, or this cluster, run nrl, and if not, what is to be done?

A check is a function from a machine's facts (`nrl.runtime.node.machine.collect_facts`) to `findings.Finding`\\ s. The
doctor is a list of checks: `hardware` reads facts alone, so it judges other hosts, too; `installation` and
`service_checks` examine this host. `runner` runs them at once, each with a time limit. `cluster` runs checks on all
hosts of a Ray cluster, `host_diff` compares the hosts, and `network_checks` measures the links between them.
"""
