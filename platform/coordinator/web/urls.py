"""Addresses of the pages."""

from django.urls import path, register_converter

from coordinator.lib.slugs import SlugConverter
from coordinator.web import (
    account_views,
    credit_views,
    document_views,
    download_views,
    estimate_views,
    machine_views,
    mirror_views,
    notification_views,
    run_compare_views,
    run_list_views,
    run_owner_views,
    run_views,
    team_views,
    token_views,
)

register_converter(SlugConverter, "name")

urlpatterns = [
    path("", run_views.show_home, name="home"),
    path("mirrors/", mirror_views.show_mirrors, name="mirrors"),
    path("runs/", run_list_views.list_runs, name="runs"),
    path("runs/compare/", run_compare_views.compare_runs, name="run_compare"),
    path("runs/new/", run_views.create_run, name="run_new"),
    path("runs/estimate/", estimate_views.estimate_draft, name="run_estimate"),
    path("runs/<str:slug>/", run_views.show_run, name="run"),
    path("download/", download_views.show_downloads, name="downloads"),
    path("download/<str:name>", download_views.send_wheel, name="download"),
    path("runs/<str:slug>/events/", run_views.show_events, name="run_events"),
    path("runs/<str:slug>/checklist/", run_views.show_checklist, name="run_checklist"),
    path("runs/<str:slug>/checkpoints/", run_views.show_checkpoints, name="run_checkpoints"),
    path("runs/<str:slug>/fits/", estimate_views.show_fit, name="run_fits"),
    path("runs/<str:slug>/edit/", run_views.edit_run, name="run_edit"),
    path("runs/<str:slug>/terms/", run_owner_views.edit_terms, name="run_terms"),
    path("runs/<str:slug>/verdicts/", run_owner_views.list_verdicts, name="run_verdicts"),
    path(
        "runs/<str:slug>/verdicts/<uuid:pk>/sign/",
        run_owner_views.sign_verdict,
        name="run_verdict_sign",
    ),
    path("runs/<str:slug>/exclude/", run_owner_views.exclude_volunteer, name="run_exclude"),
    path("runs/<str:slug>/clear/", run_owner_views.clear_volunteer, name="run_clear"),
    path("runs/<str:slug>/extend/", run_owner_views.extend_run, name="run_extend"),
    path("runs/<str:slug>/clone/", run_owner_views.clone_run, name="run_clone"),
    path("runs/<str:slug>/invitations/", run_owner_views.create_invitation, name="run_invite"),
    path(
        "runs/<str:slug>/invitations/<uuid:pk>/",
        run_owner_views.withdraw_invitation,
        name="run_withdraw",
    ),
    path("runs/<str:slug>/invited/<str:token>/", run_owner_views.accept_invitation, name="invited"),
    path("runs/<str:slug>/<slug:action>/", run_views.control_run, name="run_control"),
    path("docs/", document_views.show_document, name="documents"),
    path("licence/", document_views.show_licence, name="licence"),
    path("docs/<path:name>", document_views.show_document, name="document"),
    path("credit/", credit_views.show_leaderboard, name="leaderboard"),
    path("runs/<str:slug>/card.png", run_views.show_run_card, name="run_card"),
    path("volunteers/<uuid:pk>/card.png", credit_views.show_volunteer_card, name="volunteer_card"),
    path("volunteers/<uuid:pk>/", credit_views.show_volunteer, name="volunteer"),
    path("account/", account_views.show_account, name="account"),
    path("account/tokens/", token_views.list_tokens, name="tokens"),
    path("account/tokens/<uuid:pk>/", token_views.revoke_token, name="token_revoke"),
    path("account/delete/", account_views.delete_account, name="account_delete"),
    path("notifications/", notification_views.list_notifications, name="notifications"),
    path(
        "notifications/read/",
        notification_views.mark_notifications_read,
        name="mark_notifications_read",
    ),
    path(
        "notifications/settings/", notification_views.edit_preferences, name="notification_settings"
    ),
    path("notifications/webhooks/", notification_views.list_webhooks, name="webhooks"),
    path(
        "notifications/webhooks/<uuid:pk>/kinds/",
        notification_views.edit_webhook_types,
        name="webhook_types",
    ),
    path(
        "notifications/webhooks/<uuid:pk>/<slug:action>/",
        notification_views.control_webhook,
        name="webhook_control",
    ),
    path(
        "notifications/unsubscribe/<str:token>/", notification_views.unsubscribe, name="unsubscribe"
    ),
    path("teams/", team_views.list_teams, name="teams"),
    path("teams/new/", team_views.create_team, name="team_new"),
    path("teams/invitations/<str:token>/", team_views.answer_invitation, name="invitation"),
    path("teams/<name:slug>/", team_views.show_team, name="team"),
    path("teams/<name:slug>/rename/", team_views.rename_team, name="team_rename"),
    path("teams/<name:slug>/invite/", team_views.invite_member, name="team_invite"),
    path(
        "teams/<name:slug>/withdraw-invitation/",
        team_views.withdraw_invitation,
        name="team_withdraw_invitation",
    ),
    path("teams/<name:slug>/leave/", team_views.leave_team, name="team_leave"),
    path("teams/<name:slug>/promote/", team_views.promote_member, name="team_promote"),
    path("machines/", machine_views.list_machines, name="machines"),
    path("machines/enrol/", machine_views.find_enrolment, name="enrol_code"),
    path("machines/enrol/<str:code>/", machine_views.decide_enrolment, name="enrol"),
    path(
        "machines/<uuid:pk>/certificate/",
        credit_views.redirect_to_certificate,
        name="machine_certificate",
    ),
    path("machines/<uuid:pk>/", machine_views.show_machine, name="machine"),
    path("machines/<uuid:pk>/history/", machine_views.show_machine_history, name="machine_history"),
    *(
        path(
            f"machines/<uuid:pk>/{action}/",
            machine_views.control_machine,
            {"action": action},
            f"machine_{action}",
        )
        for action in ("pause", "resume", "confirm", "revoke")
    ),
]
