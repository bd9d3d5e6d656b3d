from django.urls import path

from coordinator.web import views

urlpatterns = [
    path("", views.home, name="home"),
    path("runs/", views.run_list, name="runs"),
    path("runs/new/", views.run_new, name="run_new"),
    path("runs/estimate/", views.run_estimate, name="run_estimate"),
    path("runs/<str:slug>/", views.run_page, name="run"),
    path("runs/<str:slug>/edit/", views.run_edit, name="run_edit"),
    path("runs/<str:slug>/<slug:action>/", views.run_control, name="run_control"),
    path("machines/", views.machine_list, name="machines"),
    path("machines/enrol/", views.enrol_code, name="enrol_code"),
    path("machines/enrol/<str:code>/", views.enrol, name="enrol"),
    path("machines/<uuid:machine>/revoke/", views.machine_revoke, name="machine_revoke"),
]
