from django.urls import path

from coordinator.web import credit, estimates, inbox, machines, organising, people, teams, tokens, views

urlpatterns = [
    path("", views.home, name="home"),
    path("runs/", views.run_list, name="runs"),
    path("runs/new/", views.run_new, name="run_new"),
    path("runs/estimate/", estimates.run_estimate, name="run_estimate"),
    path("runs/<str:slug>/", views.run_page, name="run"),
    path("runs/<str:slug>/checkpoints/", views.run_checkpoints, name="run_checkpoints"),
    path("runs/<str:slug>/edit/", views.run_edit, name="run_edit"),
    path("runs/<str:slug>/terms/", organising.run_terms, name="run_terms"),
    path("runs/<str:slug>/verdicts/", organising.run_verdicts, name="run_verdicts"),
    path("runs/<str:slug>/clone/", organising.run_clone, name="run_clone"),
    path("runs/<str:slug>/invitations/", organising.run_invite, name="run_invite"),
    path("runs/<str:slug>/invitations/<uuid:invitation>/", organising.run_withdraw, name="run_withdraw"),
    path("runs/<str:slug>/invited/<str:token>/", organising.invited, name="invited"),
    path("runs/<str:slug>/<slug:action>/", views.run_control, name="run_control"),
    path("credit/", credit.leaderboard, name="leaderboard"),
    path("volunteers/<uuid:person>/", credit.volunteer, name="volunteer"),
    path("account/", people.account, name="account"),
    path("account/tokens/", tokens.token_list, name="tokens"),
    path("account/tokens/<uuid:token>/", tokens.token_revoke, name="token_revoke"),
    path("account/leave/", people.account_leave, name="account_leave"),
    path("notifications/", inbox.notices, name="notices"),
    path("notifications/read/", inbox.notices_read, name="notices_read"),
    path("notifications/choices/", inbox.choices, name="choices"),
    path("notifications/webhooks/", inbox.webhooks, name="webhooks"),
    path("notifications/webhooks/<uuid:webhook>/<slug:action>/", inbox.webhook_control, name="webhook_control"),
    path("notifications/off/<str:token>/", inbox.unsubscribe, name="unsubscribe"),
    path("teams/", teams.team_list, name="teams"),
    path("teams/new/", teams.team_new, name="team_new"),
    path("teams/invitations/<str:token>/", teams.invitation, name="invitation"),
    path("teams/<slug:slug>/", teams.team_page, name="team"),
    path("teams/<slug:slug>/rename/", teams.team_rename, name="team_rename"),
    path("teams/<slug:slug>/invite/", teams.team_invite, name="team_invite"),
    path("teams/<slug:slug>/uninvite/", teams.team_uninvite, name="team_uninvite"),
    path("teams/<slug:slug>/part/", teams.team_part, name="team_part"),
    path("teams/<slug:slug>/promote/", teams.team_promote, name="team_promote"),
    path("machines/", machines.machine_list, name="machines"),
    path("machines/enrol/", machines.enrol_code, name="enrol_code"),
    path("machines/enrol/<str:code>/", machines.enrol, name="enrol"),
    path("machines/<uuid:machine>/", machines.machine_page, name="machine"),
    *(
        path(f"machines/<uuid:machine>/{action}/", machines.machine_control, {"action": action}, f"machine_{action}")
        for action in ("pause", "resume", "revoke")
    ),
]
