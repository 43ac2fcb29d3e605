"""Before a run: what to ask for. Simulates strategies over queue histories and recommends one."""
