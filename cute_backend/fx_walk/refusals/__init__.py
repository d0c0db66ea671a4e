"""Messages to users: reasons, contained errors, graph breaks, names of inputs."""
