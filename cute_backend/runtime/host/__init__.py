"""The process and its machine: messages, forks, other interpreters, hostile files, full disks."""
