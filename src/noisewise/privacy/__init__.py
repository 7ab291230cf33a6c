"""The budget, its accounting and the local plan that training and accounting share."""
