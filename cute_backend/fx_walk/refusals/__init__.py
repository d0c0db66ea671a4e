"""What users read: reasons, contained errors, graph breaks, names of inputs."""
