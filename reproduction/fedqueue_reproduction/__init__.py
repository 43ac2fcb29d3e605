"""The experiments of the paper: one for each table or figure, their runs, results, claims, figures and the page."""
