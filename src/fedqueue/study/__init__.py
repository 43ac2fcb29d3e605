"""A study: experiments of many runs, one for each table or figure of the paper, their results, and what follows."""
