# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab: real Debian 12 systemd hosts in systemd-nspawn, in one private set of kernel namespaces.

settings    what the environment and the command line ask for
machine     what this machine must have, checked before anything is changed
image       the hosts' base file system and the packages they can install offline
cgroups     one subtree for each host, so that memory, task and CPU limits bind
supervisor  the first process of the namespaces: network, disks, power, forwarded ports
lab         starts, finds, asks and removes a lab, from outside
cli         the commands
"""
