"""Exercise tasks: what is asked, how an answer is checked, and the feedback that names the cause of a mistake.

It comes with the first exercises; nothing is here yet.
"""
