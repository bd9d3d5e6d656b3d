"""Define the signals that the accounts app sends."""

from django.dispatch import Signal

# Sent with `person` within the transaction that deletes an account. Receivers delete or blank what
# their app stores about the person; an exception undoes the whole deletion.
account_deleted = Signal()
