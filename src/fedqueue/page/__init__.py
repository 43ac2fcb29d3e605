"""The page that shows runs while they go on and afterwards: what it tells is read from ledgers, and it decides nothing.

`history` and `follower` know a run, `answers` says what a page is told of it, `log` is its event log, `pages` serves
all that to browsers; the files of the page itself are in static/.
"""
