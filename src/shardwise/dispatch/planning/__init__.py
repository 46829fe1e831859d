"""Planning: from a call that was never seen to the plan that runs it: trace → choose → realise → lower → build."""
