from django.urls import path

from coordinator.web import estimates, machines, organising, views

urlpatterns = [
    path("", views.home, name="home"),
    path("runs/", views.run_list, name="runs"),
    path("runs/new/", views.run_new, name="run_new"),
    path("runs/estimate/", estimates.run_estimate, name="run_estimate"),
    path("runs/<str:slug>/", views.run_page, name="run"),
    path("runs/<str:slug>/checkpoints/", views.run_checkpoints, name="run_checkpoints"),
    path("runs/<str:slug>/edit/", views.run_edit, name="run_edit"),
    path("runs/<str:slug>/terms/", organising.run_terms, name="run_terms"),
    path("runs/<str:slug>/clone/", organising.run_clone, name="run_clone"),
    path("runs/<str:slug>/invitations/", organising.run_invite, name="run_invite"),
    path("runs/<str:slug>/invitations/<uuid:invitation>/", organising.run_withdraw, name="run_withdraw"),
    path("runs/<str:slug>/invited/<str:token>/", organising.invited, name="invited"),
    path("runs/<str:slug>/<slug:action>/", views.run_control, name="run_control"),
    path("machines/", machines.machine_list, name="machines"),
    path("machines/enrol/", machines.enrol_code, name="enrol_code"),
    path("machines/enrol/<str:code>/", machines.enrol, name="enrol"),
    path("machines/<uuid:machine>/", machines.machine_page, name="machine"),
    *(
        path(f"machines/<uuid:machine>/{action}/", machines.machine_control, {"action": action}, f"machine_{action}")
        for action in ("pause", "resume", "revoke")
    ),
]
